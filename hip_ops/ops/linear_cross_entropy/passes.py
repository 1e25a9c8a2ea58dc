# SPDX-License-Identifier: Apache-2.0
"""Declares the passes over a chunk of logits as torch operators. reference.py defines them."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor

from hip_ops.ops.linear_cross_entropy import reference
from hip_ops.ops.linear_cross_entropy.reference import part_size
from hip_ops.runtime.operator import Operator
from hip_ops.runtime.self_check import worst_element
from hip_ops.saved_bytes import MAX_PART_CLASSES, parts_of_exponentials

# With fewer rows, rows are cut into parts. nvidia: a block per row, on 132 processors; amd: a wave per row, on 304.
ROWS_THAT_FILL_A_DEVICE = {"nvidia": 2048, "amd": 8192}
MAX_PARTS = 16
CLASSES = 262272  # ZAYA1's vocabulary
LOGITS_AND_LABELS = """
    logits            [tokens, classes]       bf16|fp32
    labels            [tokens]                int64
"""


def parts_for(logits: Tensor) -> int:
    """Return the number of parts into which row_statistics cuts a row: enough to fill a GPU, 1 on a CPU."""
    if logits.device.type == "cpu":
        return 1
    parts, enough = 1, ROWS_THAT_FILL_A_DEVICE["amd" if torch.version.hip else "nvidia"]
    while parts < MAX_PARTS and parts * len(logits) < enough and logits.shape[1] >= 8192 * parts:
        parts *= 2
    return parts


def _example(device: torch.device, whole: bool = False, far: bool = False, parts: int = 2) -> tuple:
    """Make rows of `parts` parts, the last shorter than the others; labels at the borders of the first, of the last
    and in none. As in training rows, classes and the first class are multiples of 16, for which Triton compiles another
    kernel.

    whole: all of ZAYA1's classes. far: in every fourth row the last logits are larger by 200, so that parts take
    different references.
    """
    classes, first = CLASSES if whole else 3984, 1008
    border = first + part_size(classes, parts)
    labels = [border - 1, first + classes - 1, first - 1, first, border, first + classes, 1700, 4000, 0]
    labels += [1010, 1100, 1200, 1500, 2000, 2500, 3000]
    logits = 4 * torch.randn(len(labels), classes, device=device)
    if far:
        logits[::4, -100:] += 200
    return logits.bfloat16(), torch.tensor(labels, device=device), first, parts


def _exponentials_example(device: torch.device, whole: bool = False) -> tuple:
    return _example(device, whole, far=True, parts=parts_of_exponentials(CLASSES) if whole else 2)


def _gradient_example(device: torch.device, whole: bool = False) -> tuple:
    logits, labels, first, _ = _example(device, whole)
    normalizer, _ = reference.combined(reference.row_statistics(logits, labels, first, 1))
    return logits, labels, first, normalizer, torch.rand(len(labels), device=device), 1e-3


def _finish_example(device: torch.device, whole: bool = False) -> tuple:
    logits, labels, first, parts = _exponentials_example(device, whole)
    statistics = reference.overwrite_with_exponentials(logits, labels, first, parts)
    return logits, labels, first, statistics, 0, parts, torch.rand(len(labels), device=device), 1e-3


def _of_all_classes(example: Callable[..., tuple]) -> dict[str, tuple[Callable[[torch.device], tuple], ...]]:
    """Return more examples, for the versions that do not compile for every shape."""
    return dict.fromkeys(("hip", "triton"), (functools.partial(example, whole=True),))


def _compare(got: list, want: list, tolerance: float) -> str | None:
    """Compare each element relative to itself, because exponentials and gradients have any size. Rows are bf16."""
    result = want[0] is not None and worst_element("result", got[0], want[0], allowed=tolerance, floor=1e-30)
    return result or worst_element("row", got[1][0], want[1][0], allowed=2**-7, floor=1e-30)


def _parts_fit(values: dict) -> tuple[str, str] | None:
    if part_size(values["classes"], values["parts"]) > MAX_PART_CLASSES:
        return f"{values['classes']} classes in {values['parts']} parts", f"at most {MAX_PART_CLASSES} classes a part"
    return None


def _first_part_fits(values: dict) -> tuple[str, str] | None:
    last = values["all"] - values["parts"]
    return None if 0 <= values["first_part"] <= last else (f"first_part is {values['first_part']}", f"0 to {last}")


row_statistics = Operator(
    reference.row_statistics,
    takes=LOGITS_AND_LABELS,
    example=_example,
    more_examples=_of_all_classes(_example),
    compare=_compare,
    tolerance=1e-5,
)
overwrite_with_gradient = Operator(
    reference.overwrite_with_gradient,
    takes=LOGITS_AND_LABELS
    + """
    normalizer        [2, tokens]             wide(logits)
    grad              [tokens]                =normalizer
    """,
    mutates=("logits",),
    example=_gradient_example,
    more_examples=_of_all_classes(_gradient_example),
    compare=_compare,
    tolerance=1e-5,
)
overwrite_with_exponentials = Operator(
    reference.overwrite_with_exponentials,
    takes=LOGITS_AND_LABELS,
    rule=_parts_fit,
    mutates=("logits",),
    example=_exponentials_example,
    more_examples=_of_all_classes(_exponentials_example),
    compare=_compare,
    tolerance=2e-5,
)
finish_gradient = Operator(
    reference.finish_gradient,
    takes=LOGITS_AND_LABELS.replace("logits", "exponentials")
    + """
    statistics        [all, 3, tokens]        wide(exponentials)
    grad              [tokens]                =statistics
    """,
    rule=_first_part_fits,
    mutates=("exponentials",),
    example=_finish_example,
    more_examples=_of_all_classes(_finish_example),
    compare=_compare,
    tolerance=2e-5,
)
