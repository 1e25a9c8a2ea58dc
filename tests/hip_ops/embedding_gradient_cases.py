# SPDX-License-Identifier: Apache-2.0
"""Rows with ids, and the comparison with fp64 that every version of hip_ops.embedding_gradient must pass."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from tests.hip_ops.rms_norm_cases import BF16, FP32, FP64


@dataclass(frozen=True)
class Rows:
    """`repeated`: ids "once" come at most once, "random" are drawn, "half" are for a half of the rows the last one, as
    padding is, "one" all the same, "runs" are runs of 1, 2, 3... rows. pad: elements between the rows, and between the
    matrix's.
    """

    count: int
    classes: int
    width: int
    dtype: torch.dtype = FP32
    repeated: str = "random"
    pad: int = 0

    def __str__(self) -> str:
        return f"{self.count}x{self.width}-{self.classes}-{str(self.dtype)[6:]}-{self.repeated}" + (
            f"-pad{self.pad}" if self.pad else ""
        )


def inputs(case: Rows) -> tuple[Tensor, Tensor, Tensor]:
    """total and rows with NaN between their rows, ids in any order."""
    generator = torch.Generator().manual_seed(case.count + 7 * case.classes)
    ids = torch.randint(case.classes, (case.count,), generator=generator)
    if case.repeated == "once":
        ids = torch.randperm(case.classes, generator=generator)[: case.count]
    elif case.repeated == "half":
        ids[::2] = case.classes - 1
    elif case.repeated == "one":
        ids[:] = case.classes // 2
    elif case.repeated == "runs":
        ids = torch.repeat_interleave(torch.arange(case.count), torch.arange(case.count))[: case.count]
        ids = ids[torch.randperm(case.count, generator=generator)]
    storage = torch.full((max(1, case.count), case.width + case.pad), torch.nan, dtype=case.dtype)
    rows = storage[: case.count, : case.width].copy_(
        torch.randn(case.count, case.width, generator=generator, dtype=FP64)
    )
    total = torch.full((case.classes, case.width + case.pad), torch.nan)[:, : case.width]
    return total.copy_(torch.randn(case.classes, case.width, generator=generator)), ids, rows


def copied(tensor: Tensor, device: str | torch.device) -> Tensor:
    """Return a copy with the same strides, which `to` and `clone` would not keep."""
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device).copy_(tensor)


@contextlib.contextmanager
def new_memory_is_nan() -> Iterator[None]:
    """Fills the memory of torch.empty with NaN, so that an unwritten partial sum is not mistaken for a zero."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    filled = torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
        torch.utils.deterministic.fill_uninitialized_memory = filled


def check(module, case: Rows, device: str = "cpu") -> None:
    """Check sums in fp32, the same bits in two runs, and unchanged rows without ids."""
    total, ids, rows = (copied(tensor, device) for tensor in inputs(case))
    given = copied(total, device)
    want = total.double().index_add_(0, ids, rows.double())
    size = total.double().abs().index_add_(0, ids, rows.double().abs())
    with new_memory_is_nan():
        module.add_rows_(total, ids, rows)
    error = (total.double() - want).abs()
    # up to 2,000 sums in fp32
    assert bool((error <= 3e-6 * size).all()), f"{case}: off by {(error / size).max().item():.3g}"
    untouched = torch.ones(case.classes, dtype=torch.bool, device=device).index_fill_(0, ids, False)
    assert torch.equal(total[untouched], given[untouched]), f"{case}: rows of no id changed"
    module.add_rows_(given, ids, rows)
    assert torch.equal(total, given), f"{case}: other bits the second time"


CASES = [
    Rows(0, 5, 8),
    Rows(1, 5, 7),
    Rows(40, 5, 24, BF16),
    Rows(300, 1000, 33, pad=3),
    Rows(64, 100, 16, repeated="once"),
    Rows(33, 40, 130, BF16, "once"),
    Rows(700, 50, 20, BF16, "half"),
    Rows(97, 9, 40, repeated="one"),
    Rows(640, 3, 8, repeated="one"),
    Rows(500, 500, 48, BF16, "runs", pad=8),
    Rows(32, 4, 8, repeated="one"),
    Rows(31, 4, 8, repeated="one"),
    Rows(65, 2, 1100, BF16, "half"),
    Rows(65, 2, 1104, BF16, "half"),
    Rows(33, 40, 1100, repeated="once"),
    Rows(330, 3, 16, BF16),
]
