# SPDX-License-Identifier: Apache-2.0
"""Attention of chunks in blocks, against a mask of all pairs."""

import pytest
import torch
import torch.nn.functional as F

from zaya_plugin.model.block_attention import CpuKernel, block_attention, joined
from zaya_plugin.model.core_attention import core_attention
from zaya_plugin.parallel.context_order import ContextShard

SHARDS = [
    ContextShard(order, size, rank) for order in ("zigzag", "contiguous") for size in (1, 2, 4) for rank in range(size)
]


def inputs(shard, rows=5, dtype=torch.float64):
    """This rank's queries and all keys and values, of 2 sequences, 4 heads in 2 groups."""
    generator = torch.Generator().manual_seed(3)
    total = rows * shard.total_chunks
    query, key, value = (
        torch.randn(total, 2, heads, 8, generator=generator, dtype=torch.float64).to(dtype) for heads in (4, 2, 2)
    )
    return [x.requires_grad_() for x in (shard.take(query, 0).clone(), key, value)]


def masked(query, key, value, shard, scale=0.3):
    positions = shard.positions(len(key))
    mask = torch.arange(len(key)) <= positions[:, None]
    query, key, value = (x.permute(1, 2, 0, 3) for x in (query, key, value))
    return (
        F.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scale, enable_gqa=True)
        .permute(2, 0, 1, 3)
        .flatten(2)
    )


@pytest.mark.parametrize("shard", SHARDS, ids=lambda shard: f"{shard.order}-{shard.rank}of{shard.size}")
@pytest.mark.parametrize("dtype, bound", [(torch.float64, 1e-13), (torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
def test_every_rank_and_order(shard, dtype, bound):
    given, exact = inputs(shard, dtype=dtype), inputs(shard, dtype=dtype)
    exact = [x.detach().double().requires_grad_() for x in exact]
    starts = shard.starts(len(given[0]))
    got, expected = block_attention(*given, 0.3, starts), masked(*exact, shard)
    weights = torch.randn(got.shape, generator=torch.Generator().manual_seed(4))
    grads = torch.autograd.grad(got, given, weights.to(dtype))
    expected_grads = torch.autograd.grad(expected, exact, weights.double())
    assert got.dtype == dtype and got.shape == expected.shape
    for a, b in zip((got, *grads), (expected, *expected_grads), strict=True):
        assert (a.double() - b).norm() <= bound * b.norm()


def test_keys_behind_the_last_chunk_get_no_gradient():
    shard = ContextShard("zigzag", 2, 1)  # chunks 1 and 2 of 4
    given = inputs(shard)
    block_attention(*given, 0.3, shard.starts(10)).sum().backward()
    assert given[1].grad[15:].abs().sum() == 0 and given[2].grad[15:].abs().sum() == 0
    assert (given[2].grad[:15].abs().amin((1, 2, 3)) > 0).all()


def test_results_over_two_sets_of_keys_are_joined_without_overflow():
    out, earlier = torch.ones(1, 1, 3, 2), torch.full((1, 1, 3, 2), 3.0)
    sums = torch.tensor([0.0, 500.0, -500.0]).view(1, 1, 3, 1)
    both, total = joined(out, sums, earlier, torch.zeros(1, 1, 3, 1))
    assert torch.allclose(both[0, 0, :, 0], torch.tensor([2.0, 1.0, 3.0])) and torch.allclose(
        total.flatten(), torch.tensor([0.6931472, 500.0, 0.0])
    )


def test_the_kernel_is_checked_before_its_first_use(monkeypatch, caplog):
    def versions():
        core_attention.cache_clear()
        return core_attention("sdpa", "chunks", torch.float32, 4, 2, 8, False).running(torch.device("cpu"))

    assert versions() == ("blocks", "sdpa")
    forward = CpuKernel.forward
    monkeypatch.setattr(
        CpuKernel, "forward", lambda self, q, k, v, causal, scale: forward(self, q, k, v, causal, scale * 1.1)
    )
    assert versions() == ("sdpa",) and "the result differs by" in caplog.text
    monkeypatch.setattr(CpuKernel, "backward", lambda self, *tensors: None)  # as if torch had other arguments
    assert versions() == ("sdpa",) and "TypeError" in caplog.text
    core_attention.cache_clear()
