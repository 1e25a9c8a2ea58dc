# SPDX-License-Identifier: Apache-2.0
"""The two specs in Megatron's GPTModel, and the linears by transformer_impl."""

import pytest
import torch
from megatron.core.models.gpt import GPTModel

from zaya_plugin.model import layer_specs
from zaya_plugin.model.residual import ZayaLayerNorm, ZayaRMSNorm

GPT = dict(
    vocab_size=64,
    max_sequence_length=64,
    share_embeddings_and_output_weights=True,
    position_embedding_type="rope",
    rotary_percent=0.5,
)


@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 1e-6), (torch.bfloat16, 2e-2)])
def test_layer_spec_gives_the_logits_of_the_block_spec(make_config, batch, dtype, tolerance):
    config = make_config(num_layers=3, params_dtype=dtype, bf16=dtype == torch.bfloat16)
    bare = GPTModel(config, layer_specs.get_zaya_layer_spec(config), **GPT)
    block = GPTModel(config, layer_specs.zaya_block_spec(config), **GPT)
    perturbed = {
        k: v + 0.1 * torch.randn_like(v) if v.is_floating_point() else v
        for k, v in block.state_dict().items()
        if v is not None
    }
    block.load_state_dict(perturbed)
    bare.load_state_dict(perturbed)
    ids, positions, labels = batch()
    a, b = bare(ids, positions, None), block(ids, positions, None)
    assert a.dtype == b.dtype == dtype
    assert (a - b).float().norm() <= tolerance * b.float().norm()
    bare(ids, positions, None, labels=labels).mean().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in bare.parameters())
    assert type(bare.decoder.final_layernorm) is ZayaRMSNorm


def test_layer_spec_by_configuration(make_config):
    assert layer_specs.zaya_layer_submodules(make_config()).input_layernorm is ZayaRMSNorm
    centered = make_config(normalization="LayerNorm")
    assert layer_specs.zaya_layer_submodules(centered).pre_mlp_layernorm is ZayaLayerNorm
    assert layer_specs.zaya_block_spec(centered).layer_norm is ZayaLayerNorm
    assert len(layer_specs.zaya_block_spec(make_config(num_layers=7)).layer_specs) == 7


def test_missing_transformer_engine_is_named(make_config, monkeypatch):
    from megatron.core.extensions import transformer_engine

    monkeypatch.setattr(transformer_engine, "HAVE_TE", False)
    with pytest.raises(ValueError, match="Fix: cluster.transformer_impl=local"):
        layer_specs.get_zaya_layer_spec(make_config(transformer_impl="transformer_engine"))


def test_linears_save_no_extra_state_and_load_with_and_without_one(make_model):
    """As checkpoints before this release and those of torch hold one."""
    model = make_model()
    linear = model.decoder.layers[0].self_attention.linear_q
    assert not any("self_attention" in key and "_extra_state" in key for key in model.sharded_state_dict())
    weight = linear.weight.detach().clone() + 1
    for state in ({"weight": weight}, {"weight": weight + 1, "_extra_state": None}):
        assert not any(linear.load_state_dict(dict(state)))
        assert torch.equal(linear.weight, state["weight"])
