# SPDX-License-Identifier: Apache-2.0
"""Adapters of the experts in ZAYA1's sizes: products with 16 channels, which no other part of training has."""

import pytest
import torch
import torch.nn.functional as F

from zaya_plugin.model.experts import ExpertMLP

H, EXPERTS, RANK, SCALE = 2048, 16, 16, 2.0


@pytest.mark.gpu
@pytest.mark.parametrize("count", [EXPERTS, 1], ids=["each", "shared"])
def test_adapters_of_the_experts_against_merged_weights_in_fp32(count):
    generator = torch.Generator("cuda").manual_seed(1)
    counts = torch.tensor([0, 1, 700, 255, 17, *[283] * 11])
    offsets, rows = counts.cumsum(0).int().cuda(), int(counts.sum()) + 64

    def random(*shape, scale):
        return (torch.randn(shape, device="cuda", generator=generator) * scale).bfloat16()

    x, weights = random(rows, H, scale=1.0), torch.rand(rows, device="cuda", generator=generator)
    fc1, fc2 = random(EXPERTS, 2 * H, H, scale=0.02), random(EXPERTS, H, H, scale=0.02)
    a1, b1 = random(count, RANK, H, scale=0.02), random(count, 2 * H, RANK, scale=0.05)
    a2, b2 = random(count, RANK, H, scale=0.02), random(count, H, RANK, scale=0.05)
    adapters, grad = [t.requires_grad_() for t in (a1, b1, a2, b2)], random(rows, H, scale=1.0)
    x.requires_grad_()
    y = ExpertMLP.apply(x, weights, offsets, EXPERTS, None, SCALE, *fc1, *fc2, *adapters)
    end = int(offsets[-1])
    ours = torch.autograd.grad(y[:end], (x, *adapters), grad[:end])

    wide = [t.detach().float().requires_grad_() for t in (x, *adapters)]
    wx, *(wa1, wb1, wa2, wb2) = wide
    parts, start = [], 0
    for expert, stop in enumerate(offsets.tolist()):
        own = expert % count
        first = fc1[expert].float() + SCALE * wb1[own] @ wa1[own]
        second = fc2[expert].float() + SCALE * wb2[own] @ wa2[own]
        gate, up = (wx[start:stop] @ first.T).chunk(2, dim=-1)
        parts.append((F.silu(gate) * up * weights[start:stop, None]) @ second.T)
        start = stop
    expected = torch.cat(parts)
    theirs = torch.autograd.grad(expected, wide, grad[:end].float())
    for name, one, other in zip("y x a1 b1 a2 b2".split(), (y[:end], *ours), (expected, *theirs), strict=True):
        one, other = (t[:end] if name == "x" else t for t in (one.float(), other))
        assert (one - other).norm() < 2e-2 * other.norm(), name
