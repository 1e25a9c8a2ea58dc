# SPDX-License-Identifier: Apache-2.0
"""Rows of logits, what is exactly right for them in fp64, and the comparison that every back end must pass.

A back end is any object with row_statistics and overwrite_with_gradient of hip_ops.ops.linear_cross_entropy.reference.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from hip_ops.ops.linear_cross_entropy.reference import part_size
from tests.hip_ops.rms_norm_cases import BF16, FP32, FP64

NAMES = {BF16: "bf16", FP32: "fp32", FP64: "fp64"}
FIRST = 100  # class of the first column
EXPONENT = 2e-5  # relative error of exp in fp32 with arguments down to -100
ROUNDING = {BF16: 2**-8, FP32: 2**-23, FP64: 2**-50}  # half a step of the result


@dataclass(frozen=True)
class Logits:
    """`parts`: of a row, in the statistics. pad: elements between rows. shape: "confident" rows have one large logit,
    "far" ones lie around +-500, "rising" ones have their maximum at the end, "steps" rise by 90 from part to part,
    "nothing" has a part of which all logits are -inf.
    """

    rows: int
    classes: int
    dtype: torch.dtype = BF16
    parts: int = 1
    pad: int = 0
    shape: str = "plain"
    z_loss: float = 0.0
    seed: int = 0

    def __str__(self) -> str:
        more = "".join(
            f"-{name}{value}"
            for name, value in (("parts", self.parts), ("pad", self.pad), ("z", self.z_loss))
            if value not in (0, 1)
        )
        return f"{self.rows}x{self.classes}-{NAMES[self.dtype]}-{self.shape}{more}"


def inputs(case: Logits) -> tuple[Tensor, Tensor, Tensor]:
    """logits, labels (the first and last class of every part, one before and one behind all of them), upstream
    gradients with a zero.
    """
    generator = torch.Generator().manual_seed(case.seed + case.rows + 7 * case.classes)
    storage = torch.full((max(1, case.rows) * (case.classes + case.pad),), torch.nan, dtype=case.dtype)
    logits = storage.as_strided((case.rows, case.classes), (case.classes + case.pad, 1))
    values = 3 * torch.randn(case.rows, case.classes, generator=generator, dtype=FP64)
    size = part_size(case.classes, case.parts)
    places = [
        -1,
        case.classes,
        *(
            p
            for part in range(case.parts)
            for p in (part * size, min((part + 1) * size, case.classes) - 1)
            if 0 <= p < case.classes
        ),
    ]
    place = torch.tensor(places)[torch.arange(case.rows) % len(places)]
    if case.shape == "confident":
        values.scatter_(1, place.clamp(0, case.classes - 1)[:, None], 40.0)
    elif case.shape == "far":
        values += torch.where(torch.arange(case.rows) % 2 == 0, 500.0, -500.0)[:, None]
    elif case.shape == "rising":
        values += torch.linspace(-60, 20, case.classes, dtype=FP64)
    elif case.shape == "steps":
        values += 90.0 * (torch.arange(case.classes) // size - 1)
    elif case.shape == "nothing":
        values[:, :size] = -torch.inf
    logits.copy_(values)
    upstream = torch.rand(case.rows, generator=generator, dtype=FP64).to(FP64 if case.dtype == FP64 else FP32)
    upstream[1::4] = 0.0
    return logits, place + FIRST, upstream


def near(name: str, got: Tensor, want: Tensor, relative: float, slack: Tensor | float = 0.0) -> None:
    """Each element within `relative` of itself, and `slack`; NaN and infinities in the same places."""
    got, want = got.double().cpu(), want.double()
    assert got.shape == want.shape, f"{name}: {tuple(got.shape)}, want {tuple(want.shape)}"
    error = (got - want).abs().masked_fill((got == want) | (got.isnan() & want.isnan()), 0.0).nan_to_num(torch.inf)
    wrong = (error > relative * want.abs() + slack).nonzero()
    assert not len(wrong), (
        f"{name}: {len(wrong)} of {want.numel()} elements are wrong, the first at {wrong[0].tolist()}: "
        f"{got[tuple(wrong[0])].item():.9g}, want {want[tuple(wrong[0])].item():.9g}"
    )


def check(module, case: Logits, device: str = "cpu") -> None:
    logits, labels, upstream = inputs(case)
    exact, column = logits.double(), labels - FIRST
    here = (column >= 0) & (column < case.classes)
    of_label = (
        exact.gather(1, column.clamp(0, max(0, case.classes - 1))[:, None])[:, 0].masked_fill(~here, 0.0)
        if case.classes
        else torch.zeros(case.rows)
    )
    on_device = torch.empty_strided(logits.shape, logits.stride(), dtype=case.dtype, device=device).copy_(logits)

    found = module.row_statistics(on_device, labels.to(device), FIRST, case.parts)
    assert found.shape == (case.parts, 3, case.rows) and found.dtype == upstream.dtype
    size = part_size(case.classes, case.parts)
    for part in range(case.parts):
        piece = exact[:, part * size : (part + 1) * size]
        inside = here & (column >= part * size) & (column < (part + 1) * size)
        top = piece.amax(1) if piece.shape[1] else torch.full((case.rows,), -torch.inf, dtype=FP64)
        total = (piece - top.masked_fill(top == -torch.inf, 0.0)[:, None]).exp().sum(1)
        near(f"maximum of part {part}", found[part, 0], top, 0.0)
        near(f"sum of part {part}", found[part, 1], total, EXPONENT if case.dtype != FP64 else 1e-12)
        near(f"label of part {part}", found[part, 2], of_label.masked_fill(~inside, 0.0), 0.0)

    top, log_sum = exact.amax(1), (exact - exact.amax(1, keepdim=True)).exp().sum(1).log()
    normalizer = torch.stack((top, log_sum)).to(upstream.dtype)
    softmax = (exact - normalizer[0].double()[:, None] - normalizer[1].double()[:, None]).exp()
    factor = 1 + 2 * case.z_loss * normalizer.double().sum(0)
    hot = torch.zeros_like(exact).scatter_(
        1, column.clamp(0, max(0, case.classes - 1))[:, None], here.double()[:, None]
    )
    want = (softmax * factor[:, None] - hot) * upstream.double()[:, None]
    wide = torch.full((2, case.rows + 3), torch.nan, dtype=upstream.dtype, device=device)
    wide[:, 1 : case.rows + 1] = normalizer  # as a piece of all tokens' normalizer
    module.overwrite_with_gradient(
        on_device, labels.to(device), FIRST, wide[:, 1 : case.rows + 1], upstream.to(device), case.z_loss
    )
    # where a probability near 1 meets the label, what is left is as exact as the probability
    slack = (EXPONENT if case.dtype != FP64 else 1e-12) * softmax * factor[:, None].abs() * upstream.double()[:, None]
    near("gradient", on_device, want, ROUNDING[case.dtype], slack + 1e-37)


CASES = [
    Logits(9, 4096, parts=2),
    Logits(5, 1000, parts=4, shape="rising"),
    Logits(7, 45),
    Logits(6, 333, parts=3, pad=3),
    Logits(5, 512, pad=8, shape="confident"),
    Logits(6, 2056, FP32, parts=2, z_loss=1e-2),
    Logits(5, 37, FP32, shape="far"),
    Logits(4, 640, FP32, pad=1, shape="rising"),
    Logits(3, 1, FP32),
    Logits(8, 2600, shape="far", z_loss=1e-4),
    Logits(4, 96, parts=8),
    Logits(6, 640, parts=2, shape="nothing"),
    Logits(0, 64),
    Logits(1, 9001, parts=2),
]
