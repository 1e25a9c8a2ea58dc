# SPDX-License-Identifier: Apache-2.0
"""Inputs of grouped products, their exact results, and how far a right result may be from them.

`backend` is any object with the functions of hip_ops.ops.grouped_product.reference. Padding rows hold NaN, which must not
get into a result.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tests.hip_ops.product_cases import DIGITS, DTYPES, ulp

DTYPES = {**DTYPES, "fp32": torch.float32}
ROUNDED_ONCE = 0.5 + 2**-12  # ULP; the remainder is for results on the edge between two binades


@dataclass(frozen=True)
class Grouped:
    """counts: rows of each expert; `padding_rows` rows without an expert follow.

    Operands are [T, k] and [E, k, n]; for outer products [T, k] and [T, n].
    """

    counts: tuple[int, ...]
    k: int
    n: int
    dtype: str = "bf16"
    padding_rows: int = 5
    pad: int = 0  # columns between rows, which make them strided
    seed: int = 0

    @property
    def rows(self) -> int:
        return sum(self.counts)

    def __str__(self) -> str:
        return f"{'_'.join(map(str, self.counts))}-{self.k}x{self.n}-{self.dtype}" + f"-pad{self.pad}" * bool(self.pad)

    def offsets(self, device="cpu") -> Tensor:
        return torch.tensor(self.counts).cumsum(0).int().to(device)

    def random(self, *shape: int, salt: int = 0) -> Tensor:
        return torch.randn(shape, generator=torch.Generator().manual_seed(self.seed + salt)).to(DTYPES[self.dtype])

    def operand(self, columns: int, salt: int, device="cpu") -> Tensor:
        """[T + padding_rows, columns] with NaN in padding rows, and between rows."""
        wide = torch.full((self.rows + self.padding_rows, columns + self.pad), float("nan"), dtype=DTYPES[self.dtype])
        wide[: self.rows, :columns] = self.random(self.rows, columns, salt=salt)
        return wide.to(device)[:, :columns]

    def matrices(self, transposed: bool, device="cpu") -> Tensor:
        stored = self.random(len(self.counts), *((self.n, self.k) if transposed else (self.k, self.n)), salt=3).to(
            device
        )
        return stored.mT if transposed else stored

    def expert_of_row(self) -> Tensor:
        return torch.repeat_interleave(torch.arange(len(self.counts)), torch.tensor(self.counts))


def check_close(got: Tensor, exact: Tensor, size: Tensor, terms: Tensor | int) -> None:
    """One rounding to got's dtype, after fp32 sums of `terms` products in any order: (terms + 2) 2^-24 of the
    magnitudes.
    """
    got = got.cpu()
    assert got.isfinite().all(), f"{int((~got.isfinite()).sum())} of {got.numel()} results are not finite"
    excess = ((got.double() - exact).abs() - (terms + 2) * 2.0**-24 * size).clamp_min(0)
    if got.dtype in DIGITS:
        worst = (excess / ulp(exact, got.dtype)).max().item() if got.numel() else 0.0
        assert worst <= ROUNDED_ONCE, f"{worst:.3f} ULP of {got.dtype}"
    else:
        assert not excess.any(), f"{excess.max().item():.3g} more than sums in fp32 may be off"


def check_rows(backend, case: Grouped, transposed: bool, device="cpu") -> None:
    x, matrices = case.operand(case.k, 1, device), case.matrices(transposed, device)
    got = backend.grouped_rows(x, matrices, case.offsets(device))
    assert got.shape == (case.rows + case.padding_rows, case.n) and got.dtype == x.dtype
    left, right = x.cpu()[: case.rows].double().unsqueeze(1), matrices.cpu().double()[case.expert_of_row()]
    check_close(got[: case.rows], (left @ right)[:, 0], (left.abs() @ right.abs())[:, 0], case.k)


def check_outer(backend, case: Grouped, accumulate: bool, device="cpu", out_dtype: torch.dtype = torch.float32) -> None:
    a, b = case.operand(case.k, 1, device), case.operand(case.n, 2, device)
    experts = len(case.counts)
    before = torch.randn(experts, case.k, case.n, generator=torch.Generator().manual_seed(9)).to(out_dtype)
    guarded = torch.full((experts + 2, case.k, case.n), 7.0, dtype=out_dtype)
    guarded[1:-1] = before
    guarded = guarded.to(device)
    backend.grouped_outer_(guarded[1:-1], a, b, case.offsets(device), accumulate)
    got = guarded.cpu()
    assert (got[0] == 7).all() and (got[-1] == 7).all(), "written outside of the block"
    one_hot = torch.nn.functional.one_hot(case.expert_of_row(), experts).double()
    left, right = (t.cpu()[: case.rows].double() for t in (a, b))
    exact = torch.einsum("te,tm,tn->emn", one_hot, left, right)
    size = torch.einsum("te,tm,tn->emn", one_hot, left.abs(), right.abs())
    if accumulate:
        exact, size = exact + before.double(), size + before.double().abs()
    check_close(got[1:-1], exact, size, torch.tensor(case.counts).view(-1, 1, 1))
    for expert, count in enumerate(case.counts):
        if count == 0:
            assert torch.equal(got[1 + expert], before[expert] if accumulate else torch.zeros_like(before[expert]))
