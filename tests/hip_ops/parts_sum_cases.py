# SPDX-License-Identifier: Apache-2.0
"""Parts of a sum, and the comparison with fp64 and with a loop written out that every back end of hip_ops.parts_sum must pass, to the bit."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tests.hip_ops.rms_norm_cases import BF16, FP32

FP16 = torch.float16
GUARD = 7.0  # what lies beside `out`
SPECIAL = (torch.inf, -torch.inf, torch.nan, 1.0, -1.0, 0.0, -0.0)


@dataclass(frozen=True)
class Parts:
    """pad: elements between the rows. in_place: out is own. offset: elements by which out and own miss an alignment. special: infinities, NaN, zeros of
    both signs, the largest and the smallest numbers, in all combinations that a draw comes to."""

    count: int
    size: int
    rank: int
    dtype: torch.dtype = FP32
    pad: int = 0
    in_place: bool = True
    offset: int = 0
    special: bool = False

    def __str__(self) -> str:
        options = (
            (f"-pad{self.pad}", self.pad),
            ("-out", not self.in_place),
            (f"-off{self.offset}", self.offset),
            ("-special", self.special),
        )
        return f"{self.count}of{self.size}-rank{self.rank}-{str(self.dtype)[6:]}" + "".join(
            name for name, there in options if there
        )


def inputs(case: Parts) -> Tensor:
    """[size, count], the rows to be added."""
    generator = torch.Generator().manual_seed(case.count + 7 * case.size + case.rank)
    shape = (case.size, case.count)
    if not case.special:
        # Of sizes that differ by some bits, so that another order comes to other bits.
        return (torch.randn(shape, generator=generator) * torch.rand(shape, generator=generator).mul(8).exp2()).to(
            case.dtype
        )
    info = torch.finfo(case.dtype)
    tiny = info.smallest_normal
    values = torch.tensor(
        [*SPECIAL, info.max, -info.max, tiny, -tiny, tiny / 2, -tiny / 4, tiny * info.eps], dtype=torch.float64
    ).to(case.dtype)
    return values[torch.randint(len(values), shape, generator=generator)]


def one_by_one(rows: Tensor) -> Tensor:
    """In fp32, in the order of rows, from row 0 itself on, rounded once; fp64 as it is."""
    wide = torch.promote_types(rows.dtype, FP32)
    total = rows[0].to(wide)
    for row in rows[1:]:
        total = total + row.to(wide)
    return total.to(rows.dtype)


def same_bits(mine: Tensor, theirs: Tensor) -> bool:
    """But for NaN, of which there are many."""
    number = ~theirs.isnan()
    bits = {8: torch.int64, 4: torch.int32, 2: torch.int16}[mine.element_size()]
    return torch.equal(mine.isnan(), theirs.isnan()) and torch.equal(mine.view(bits)[number], theirs.view(bits)[number])


def check(module, case: Parts, device: str = "cpu") -> None:
    """The sum to the bit; within its roundings of fp64's; nothing but `out` written; the own row of parts, which is NaN, not read."""
    rows = inputs(case)
    # 1 GUARD before and 16 behind at least, of which 16 keep `out` at a multiple of 32 bytes
    buffers = [
        torch.full((16 + case.offset + case.count + 16,), GUARD, dtype=case.dtype, device=device)
        for _ in range(1 if case.in_place else 2)
    ]
    out, own = (buffer[16 + case.offset : 16 + case.offset + case.count] for buffer in (buffers[0], buffers[-1]))
    storage = torch.full((case.size, case.count + case.pad), torch.nan, dtype=case.dtype, device=device)
    parts = storage[:, : case.count]
    parts.copy_(rows)
    own.copy_(rows[case.rank])
    parts[case.rank] = torch.nan
    before = storage.clone(), buffers[-1].clone()
    module.add_up_parts_(out, own, parts, case.rank)
    found, right = out.cpu(), one_by_one(rows)
    assert same_bits(found, right), f"{case}: other bits"
    assert same_bits(storage.flatten(), before[0].flatten()), f"{case}: parts were written"
    if not case.in_place:
        assert same_bits(buffers[-1], before[1]), f"{case}: own was written"
    for buffer in buffers:
        beside = torch.cat((buffer[: 16 + case.offset], buffer[16 + case.offset + case.count :]))
        assert bool((beside == GUARD).all()), f"{case}: something beside out was written"
    if not case.special:
        exact, magnitude = rows.double().sum(dim=0), rows.double().abs().sum(dim=0)
        # half an ULP of fp32 for each addition (2^-24 of what it comes to), and half an ULP of the dtype
        allowed = 1.001 * ((case.size - 1) * 2**-24 * magnitude + torch.finfo(case.dtype).eps / 2 * exact.abs())
        assert bool(((found.double() - exact).abs() <= allowed).all()), f"{case}: not within its roundings"


CASES = [
    *(
        Parts(1000, size, rank, dtype)
        for size in (1, 2, 3, 8)
        for rank in sorted({0, size // 2, size - 1})
        for dtype in (FP32, BF16, FP16)
    ),
    *(
        Parts(count, 3, 1, dtype, pad=pad)
        for count, pad in ((0, 0), (1, 0), (31, 5), (2048, 0), (2049, 2047), (8192, 8), (12289, 3))
        for dtype in (FP32, BF16)
    ),
    Parts(4100, 3, 2, offset=1),
    Parts(4100, 3, 0, BF16, pad=1, offset=3),
    Parts(4100, 4, 1, FP16, in_place=False),
    Parts(4100, 4, 3, in_place=False),
    *(
        Parts(4000, size, rank, dtype, special=True)
        for size, rank in ((1, 0), (2, 0), (2, 1), (3, 1), (8, 5))
        for dtype in (FP32, BF16, FP16)
    ),
]
