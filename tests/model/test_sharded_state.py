# SPDX-License-Identifier: Apache-2.0
"""Distributed checkpoint of the model on one rank: keys, replicas, and values after save and load."""

import torch
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.mapping import ShardedTensor

BUFFERS = ("balancing_biases", "balancing_exp_avg", "balancing_exp_avg_sq", "balancing_step")


def tensors(sharded):
    return {k: v for k, v in sharded.items() if isinstance(v, ShardedTensor)}


def test_every_expert_and_buffer_has_its_own_key(make_model):
    model = make_model()
    sharded = tensors(model.sharded_state_dict())
    keys = [t.key for t in sharded.values()]
    assert len(set(keys)) == len(keys)
    for layer in range(4):
        for e in range(4):
            assert f"decoder.layers.{layer}.mlp.experts.linear_fc1.weight{e}" in keys
            assert f"decoder.layers.{layer}.mlp.experts.linear_fc2.weight{e}" in keys
        for name in BUFFERS:
            assert f"decoder.layers.{layer}.mlp.router.{name}" in keys
    assert not any("tokens_per_expert" in k or "entropy" in k for k in keys)
    held = {name for name, t in model.state_dict().items() if t is not None}
    assert {k for k in sharded if k != "output_layer.weight"} == held - {"output_layer.weight"}
    assert all(t.replica_id in ((0, 0, 0), 0) for t in sharded.values())


def test_save_and_load(make_model, tmp_path):
    saved = make_model()
    with torch.no_grad():
        for name, b in saved.named_buffers():
            if name.endswith(BUFFERS):
                b.copy_(torch.randint(1, 9, b.shape) if b.dtype == torch.int64 else torch.randn(b.shape))
    dist_checkpointing.save(saved.sharded_state_dict(), str(tmp_path))
    loaded = make_model(init_method_std=0.5)
    with torch.no_grad():
        for p in loaded.parameters():
            p.zero_()
    state = dist_checkpointing.load(loaded.sharded_state_dict(), str(tmp_path))
    loaded.load_state_dict(state)
    for name, t in saved.state_dict().items():
        assert t is None or torch.equal(loaded.state_dict()[name], t), name
    assert loaded.decoder.layers[3].mlp.router.balancing_step.dtype == torch.int64


def test_a_checkpoint_of_an_earlier_version_loads(make_model, tmp_path):
    """It holds an empty `_extra_state` of every linear of attention."""
    from megatron.core.transformer.utils import make_sharded_object_for_checkpoint

    saved, loaded = make_model(), make_model(init_method_std=0.5)
    state = saved.sharded_state_dict()
    keys = [name.removesuffix("weight") + "_extra_state" for name in state if ".self_attention.linear_" in name]
    keys = [key for key in keys if "linear_v" not in key]
    assert len(keys) == 3 * 4 and not {*keys} & {*state}
    state |= {key: make_sharded_object_for_checkpoint(None, key) for key in keys}
    dist_checkpointing.save(state, str(tmp_path))
    loaded.load_state_dict(dist_checkpointing.load(loaded.sharded_state_dict(), str(tmp_path)))
    assert all(torch.equal(a, b) for a, b in zip(saved.parameters(), loaded.parameters(), strict=True))
