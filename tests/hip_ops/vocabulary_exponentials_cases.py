# SPDX-License-Identifier: Apache-2.0
"""Rows of logits and what one pass over them has to give, from fp64; the comparison that every back end must pass.

A back end is any object with overwrite_with_exponentials and finish_gradient of hip_ops.ops.linear_cross_entropy.reference.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from hip_ops.ops.linear_cross_entropy.reference import EXPONENT_PERIOD, part_size, reference_of
from tests.hip_ops.rms_norm_cases import FP32, FP64
from tests.hip_ops.vocabulary_rows_cases import EXPONENT, FIRST, ROUNDING, Logits, inputs, near

TINY = 1e-36  # smaller exponentials may be rounded to less digits, or to zero


def on_device(tensor: Tensor, device: str) -> Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device).copy_(tensor)


def check(module, case: Logits, device: str = "cpu", other_ranks: int = 0) -> None:
    """other_ranks: as many copies of these statistics, with other references, stand before them as if of other
    ranks.
    """
    logits, labels, upstream = inputs(case)
    exact, column, wide = logits.double(), labels - FIRST, case.dtype == FP64
    here = (column >= 0) & (column < case.classes)
    place = column.clamp(0, max(0, case.classes - 1))[:, None]
    of_label = exact.gather(1, place)[:, 0].masked_fill(~here, 0.0)
    given, size, exponent = on_device(logits, device), part_size(case.classes, case.parts), 1e-12 if wide else EXPONENT

    statistics = module.overwrite_with_exponentials(given, labels.to(device), FIRST, case.parts)
    assert statistics.shape == (case.parts, 3, case.rows) and statistics.dtype == upstream.dtype
    exponentials = torch.zeros_like(exact)
    for part in range(case.parts):
        piece = exact[:, part * size : (part + 1) * size]
        inside = here & (column >= part * size) & (column < (part + 1) * size)
        top = piece.amax(1) if piece.shape[1] else torch.full((case.rows,), -torch.inf, dtype=FP64)
        relative_to = reference_of(top.to(upstream.dtype)).double()
        near(f"reference of part {part}", statistics[part, 0], relative_to, 0.0)
        e = (piece - relative_to.masked_fill(top == -torch.inf, 0.0)[:, None]).exp()
        exponentials[:, part * size : (part + 1) * size] = e
        near(f"sum of part {part}", statistics[part, 1], e.sum(1), exponent, TINY)
        near(f"label of part {part}", statistics[part, 2], of_label.masked_fill(~inside, 0.0), 0.0)
    near("exponentials", given, exponentials, ROUNDING[case.dtype] + exponent, TINY)

    shares = torch.full((case.rows,), 1.0 + other_ranks, dtype=FP64)
    everyone = statistics.cpu()
    for rank in range(other_ranks):  # the same logits moved by a whole number of periods, the label not among them
        moved = EXPONENT_PERIOD * (rank - 1)
        copied = everyone[-case.parts :].clone()
        copied[:, 0] += moved
        copied[:, 2] = 0.0
        shares += torch.expm1(torch.tensor(moved, dtype=FP64))
        everyone = torch.cat((copied, everyone))
    found = module.finish_gradient(
        given,
        labels.to(device),
        FIRST,
        everyone.to(device),
        len(everyone) - case.parts,
        case.parts,
        upstream.to(device),
        case.z_loss,
    )
    assert found.shape == (2, case.rows) and found.dtype == upstream.dtype
    lse = exact.logsumexp(1) + shares.log()
    factor = 1 + 2 * case.z_loss * lse
    softmax = (exact - lse[:, None]).exp()
    hot = torch.zeros_like(exact).scatter_(1, place, here.double()[:, None])
    want = (softmax * factor[:, None] - hot) * upstream.double()[:, None]
    # rounded as exponentials, and where a part had another reference than the row once more
    slack = 3 * exponent * softmax * factor[:, None].abs() * upstream.double()[:, None]
    got = given.double().cpu() * found[1].double().cpu()[:, None]
    near("gradient", got, want, 2 * ROUNDING[case.dtype] + 2 * exponent, slack + 1e-18)
    near("losses", found[0], lse - of_label + case.z_loss * lse.square(), 2 * exponent, 2e-6 if not wide else 1e-12)


CASES = [
    Logits(9, 4096, parts=2),
    Logits(5, 1000, parts=4, shape="rising"),
    Logits(7, 45),
    Logits(6, 333, parts=3, pad=3),
    Logits(5, 512, pad=8, shape="confident"),
    Logits(6, 2056, FP32, parts=2, z_loss=1e-2),
    Logits(5, 37, FP32, shape="far"),
    Logits(4, 640, FP32, parts=2, pad=1, shape="far"),
    Logits(3, 1, FP32),
    Logits(8, 2600, parts=3, shape="far", z_loss=1e-4),
    Logits(4, 96, parts=8),
    Logits(6, 640, parts=2, shape="nothing"),
    Logits(0, 64),
    Logits(1, 9001, parts=5),
    Logits(6, 640, parts=4, shape="steps"),
    Logits(6, 200, FP32, parts=3, shape="steps", pad=3),
]
SEVERAL_RANKS = [replace(CASES[0], rows=6), replace(CASES[5], z_loss=0.0), CASES[7], CASES[14]]
