# SPDX-License-Identifier: Apache-2.0
"""Sizes, the comparison that every version of hip_ops' add_gradient_ must pass, and the mistakes that it must see."""

from __future__ import annotations

import torch

from tests.hip_ops.injected_bug import Bug

# elements: none, one, a part of a lane's eight, a block of either kernel and a bit more, several blocks
COUNTS = (0, 1, 7, 8, 1024, 1032, 8192, 8200, 8195, 20_000)


def check(add_gradient_, count: int, device: str = "cpu", offset: int = 0) -> None:
    """Compare total += part with fp64 to the bit: each result is one fp32 sum of exact numbers. offset: elements before
    the arrays, so that they do not start at multiples of 16 bytes. What lies around `total` must not change.
    """
    generator = torch.Generator().manual_seed(count + 1)
    around = torch.randn(count + offset + 3, generator=generator).to(device)
    part = torch.randn(count + offset, generator=generator).bfloat16().to(device)[offset:]
    total, before = around[offset : offset + count], around.clone()
    want = (before.double()[offset : offset + count] + part.double()).float()
    add_gradient_(total, part)
    assert torch.equal(total, want), f"{count} elements: off by {(total - want).abs().max()}"
    before[offset : offset + count] = total
    assert torch.equal(around, before), f"{count} elements: written outside"


def in_source(right: str, wrong: str) -> Bug:
    return Bug("gradient_addition.hip", right, wrong, case=COUNTS)


BUGS = {
    "total_overwritten": in_source("    sums[p].add(x[p]);\n", "    sums[p].clear(), sums[p].add(x[p]);\n"),
    "one_piece": in_source("    if (at >= count) break;\n", "    if (at >= count || p > 0) break;\n"),
    "first_piece_for_all": in_source("x[p].read(part + at)", "x[p].read(part + first)"),
    "blocks_overlap": in_source("int64_t(blockIdx.x) * kPieces * kStep", "int64_t(blockIdx.x) * kStep"),
    "too_few_blocks": in_source("(count + of_block - 1) / of_block", "count / of_block"),
}
# Not seen in the numbers, but outside of the arrays.
ONE_TOO_MANY = in_source("    if (at < count) x[p]", "    if (at <= count) x[p]")
