# SPDX-License-Identifier: Apache-2.0
"""Products of the head with tails of tiles, and their check against fp64."""

from typing import NamedTuple

import torch


class Dense(NamedTuple):
    """out [rows, columns] = a [rows, depth] b. by_columns: which of a and b lie in memory by columns."""

    rows: int
    depth: int
    columns: int
    out: torch.dtype
    by_columns: str = ""
    accumulate: bool = False


CASES = [
    Dense(72, 40, 264, torch.bfloat16, "b"),
    Dense(264, 520, 136, torch.float32),
    Dense(264, 520, 136, torch.bfloat16),
    Dense(264, 72, 392, torch.float32, "a", accumulate=True),
    Dense(136, 72, 40, torch.float32, "ab"),
    Dense(136, 72, 40, torch.float32, accumulate=True),
]


def check(function, case: Dense, device: str) -> None:
    """Compare function(out, a, b, accumulate) with fp64: one rounding to `out`, and sums in fp32."""
    generator = torch.Generator(device).manual_seed(case.rows + case.depth)

    def operand(name: str, rows: int, columns: int) -> torch.Tensor:
        shape = (columns, rows) if name in case.by_columns else (rows, columns)
        matrix = torch.randn(shape, generator=generator, device=device).bfloat16()
        return matrix.t() if name in case.by_columns else matrix

    a, b = operand("a", case.rows, case.depth), operand("b", case.depth, case.columns)
    out = torch.randn(case.rows, case.columns, generator=generator, device=device).to(case.out)
    want = a.double() @ b.double() + (out.double() if case.accumulate else 0)
    terms = a.double().abs() @ b.double().abs() + 1
    function(out, a, b, case.accumulate)
    error = (out.double() - want).abs()
    allowed = 1e-5 * terms + (2**-8 * want.abs() if case.out == torch.bfloat16 else 0)
    assert (error <= allowed).all(), (error - allowed).max()
