# SPDX-License-Identifier: Apache-2.0
"""The model as Megatron wraps it for training in bf16: finite, one block of experts, no wait for the host."""

from collections import Counter

import pytest
import torch

import hip_ops
from tests.megatron_rank import single_rank  # noqa: F401  (a fixture of every test of this file)
from tests.no_waiting import no_waiting


@pytest.fixture(scope="module")
def wrapped(single_rank):  # noqa: F811
    """Two layers of 256 channels with 16 experts under DDP with the distributed optimizer's buffers."""
    from megatron.core.distributed import DistributedDataParallelConfig
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
    from megatron.core.transformer.module import Float16Module
    from megatron.training.training import wrap_model_chunks_with_ddp

    from zaya_plugin.model.build import build_zaya_model
    from zaya_plugin.model.config import ZayaConfig

    model_parallel_cuda_manual_seed(1234)
    config = ZayaConfig(
        num_layers=2,
        hidden_size=256,
        num_attention_heads=8,
        num_query_groups=2,
        kv_channels=32,
        ffn_hidden_size=256,
        moe_ffn_hidden_size=256,
        num_moe_experts=16,
        router_hidden_size=32,
        bf16=True,
        params_dtype=torch.bfloat16,
        router_init_std=0.2,
    )
    model = Float16Module(config, build_zaya_model(config, vocab_size=512, max_sequence_length=256).cuda())
    ddp = DistributedDataParallelConfig(grad_reduce_in_fp32=True, use_distributed_optimizer=True)
    return wrap_model_chunks_with_ddp([model], config, ddp)[0]


def gpt(wrapped):
    return wrapped.module.module


def test_experts_are_one_block_after_wrapping(wrapped):
    from zaya_plugin.model.experts import as_block

    for layer in gpt(wrapped).decoder.layers:
        for group in (layer.mlp.experts.linear_fc1, layer.mlp.experts.linear_fc2):
            matrices = group.matrices()
            block = as_block(matrices)
            assert block.data_ptr() == matrices[0].data_ptr(), "the experts were copied"
            buffer = wrapped.expert_parallel_buffers[0].param_data.untyped_storage()
            assert block.untyped_storage().data_ptr() == buffer.data_ptr()
            block[3, 0, 0] = 7.0
            assert matrices[3][0, 0].item() == 7.0


def test_moe_layer_uses_grouped_products_and_never_waits(wrapped, monkeypatch):
    calls = Counter()
    for name in ("grouped_rows", "grouped_outer_"):
        original = getattr(hip_ops, name)
        monkeypatch.setattr(
            hip_ops, name, lambda *what, _name=name, _original=original: calls.update([_name]) or _original(*what)
        )
    moe = gpt(wrapped).decoder.layers[0].mlp.train()
    x = torch.randn(128, 2, 256, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    moe(x)[0].sum().backward()  # allocations and handles of the first time
    calls.clear()
    with no_waiting():
        output, state = moe(x)
        (output.float().square().mean() + state.float().mean()).backward()
    assert calls == {"grouped_rows": 4, "grouped_outer_": 2}  # two products forward, four backward
    assert output.isfinite().all() and x.grad.isfinite().all() and x.grad.abs().sum() > 0
    assert moe.router.tokens_per_expert.sum().item() == 2 * 256


def test_gradients_reach_the_fp32_buffer(wrapped):
    wrapped.zero_grad_buffer()
    ids = torch.randint(0, 512, (2, 128), device="cuda", generator=torch.Generator("cuda").manual_seed(1))
    positions = torch.arange(128, device="cuda").expand(2, -1)
    losses = wrapped(ids, positions, None, labels=ids.roll(-1, 1))
    assert losses.shape == (2, 128) and losses.isfinite().all()
    losses.float().mean().backward()
    for name, parameter in wrapped.named_parameters():
        assert parameter.main_grad.dtype == torch.float32 and parameter.main_grad.isfinite().all(), name
    for buffer in (*wrapped.buffers, *wrapped.expert_parallel_buffers):
        assert buffer.grad_data.dtype == torch.float32
        assert 1e-3 < buffer.grad_data.norm().item() < 1e3
