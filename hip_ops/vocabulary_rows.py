# SPDX-License-Identifier: Apache-2.0
"""The two kernels of cross-entropy over a large vocabulary as torch operators: row statistics, and logits overwritten with their gradient.

Conventions that all back ends share are in hip_ops/reference/vocabulary_rows.py. The way through the head is hip_ops/linear_cross_entropy.py.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hip_ops.direct import direct_operator
from hip_ops.operator import Operator
from hip_ops.reference import vocabulary_rows as reference
from hip_ops.self_check import worst_element

ROWS_THAT_FILL_A_DEVICE = {
    "nvidia": 2048,
    "amd": 8192,
}  # a block a row on 132 processors, a wave a row on 304; with fewer, rows are cut into parts
MOST_PARTS = 16


def parts_for(logits: Tensor) -> int:
    """Parts of a row: as many as give every processor of a GPU rows enough; 1 on a CPU."""
    if logits.device.type == "cpu":
        return 1
    parts, enough = 1, ROWS_THAT_FILL_A_DEVICE["amd" if torch.version.hip else "nvidia"]
    while parts < MOST_PARTS and parts * len(logits) < enough and logits.shape[1] >= 8192 * parts:
        parts *= 2
    return parts


def _example(gradient: bool):
    """Rows cut in two whose second part is the shorter one, labels in both, at their borders and in neither."""

    def make(device: torch.device) -> tuple:
        rows, classes, first = 9, 4232, 1000
        logits = (4 * torch.randn(rows, classes, device=device)).bfloat16()
        border = first + reference.part_size(classes, 2)
        labels = torch.tensor(
            [first, border - 1, border, first + classes - 1, first - 1, first + classes, 1700, 4000, 0]
        ).to(device)
        if not gradient:
            return logits, labels, first, 2
        normalizer, _ = reference.combined(reference.row_statistics(logits, labels, first, 1))
        return logits, labels, first, normalizer, torch.rand(rows, device=device), 1e-3

    return make


def _compare(got: list, want: list) -> str | None:
    """Each element against itself: the largest of a row of gradients is 1, the others are one in as many as there are classes."""
    statistics = want[0] is not None and worst_element("statistics", got[0], want[0], allowed=1e-5, floor=1e-12)
    return statistics or worst_element("gradient", got[1][0], want[1][0], allowed=2**-7, floor=1e-12)


def _operator(name: str) -> Operator:
    return Operator(
        name,
        torch=getattr(reference, name),
        triton=f"hip_ops.triton_kernels.vocabulary_rows:{name}",
        hip=f"hip_ops.hip_kernels.vocabulary_rows:{name}",
        example=_example(name.startswith("overwrite")),
        compare=_compare,
    )


_statistics, _gradient = _operator("row_statistics"), _operator("overwrite_with_gradient")


def version_for(operator: Operator, logits: Tensor):
    """fp64 is for checking and runs in plain torch."""
    return operator.reference if logits.dtype == torch.float64 else operator


@direct_operator("hip_ops::row_statistics", mutates_args=())
def row_statistics(logits: Tensor, labels: Tensor, first_class: int, parts: int) -> Tensor:
    """As hip_ops.reference.vocabulary_rows.row_statistics, whatever runs."""
    return version_for(_statistics, logits)(logits, labels, first_class, parts)


@row_statistics.register_fake
def _(logits, labels, first_class, parts):
    return logits.new_empty((parts, 3, len(logits)), dtype=reference.compute_dtype(logits))


@direct_operator("hip_ops::overwrite_with_gradient", mutates_args=("logits",))
def overwrite_with_gradient(
    logits: Tensor, labels: Tensor, first_class: int, normalizer: Tensor, grad: Tensor, z_loss: float
) -> None:
    """As hip_ops.reference.vocabulary_rows.overwrite_with_gradient, whatever runs; logits of contiguous rows."""
    assert logits.stride(1) == 1 or logits.shape[1] < 2, f"logits have strides {logits.stride()}"
    version_for(_gradient, logits)(logits, labels, first_class, normalizer, grad, z_loss)


@overwrite_with_gradient.register_fake
def _(logits, labels, first_class, normalizer, grad, z_loss):
    return None
