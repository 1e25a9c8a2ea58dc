# SPDX-License-Identifier: Apache-2.0
"""Cross-entropy over a large vocabulary in one pass over the logits, as torch operators: the exponentials, and what makes gradients of them.

Conventions that all back ends share are in hip_ops/reference/vocabulary_exponentials.py. The way through the head is hip_ops/linear_cross_entropy.py.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hip_ops.direct import direct_operator
from hip_ops.operator import Operator
from hip_ops.reference import vocabulary_exponentials as reference
from hip_ops.reference.vocabulary_rows import compute_dtype, part_size
from hip_ops.self_check import worst_element
from hip_ops.vocabulary_rows import version_for


def _example(device: torch.device) -> tuple:
    """Rows of two parts, the second the shorter one; one row of four whose parts have different references; labels in both, at borders and in neither."""
    rows, classes, first = 9, 3976, 1000
    logits = 4 * torch.randn(rows, classes, device=device)
    border = first + part_size(classes, 2)
    logits[::4, -100:] += 200
    labels = torch.tensor(
        [first, border - 1, border, first + classes - 1, first - 1, first + classes, 1700, 4000, 0]
    ).to(device)
    return logits.bfloat16(), labels, first, 2


def _finish_example(device: torch.device) -> tuple:
    logits, labels, first, parts = _example(device)
    statistics = reference.overwrite_with_exponentials(logits, labels, first, parts)
    return logits, labels, first, statistics, 0, parts, torch.rand(len(labels), device=device), 1e-3


def _compare(got: list, want: list) -> str | None:
    """Each element against itself: exponentials have any size."""
    return worst_element("result", got[0], want[0], allowed=2e-5, floor=1e-30) or worst_element(
        "row", got[1][0], want[1][0], allowed=2**-7, floor=1e-30
    )


def _operator(name: str, example) -> Operator:
    return Operator(
        name,
        torch=getattr(reference, name),
        triton=f"hip_ops.triton_kernels.vocabulary_exponentials:{name}",
        hip=f"hip_ops.hip_kernels.vocabulary_exponentials:{name}",
        example=example,
        compare=_compare,
    )


_exponentials, _finish = (
    _operator("overwrite_with_exponentials", _example),
    _operator("finish_gradient", _finish_example),
)


@direct_operator("hip_ops::overwrite_with_exponentials", mutates_args=("logits",))
def overwrite_with_exponentials(logits: Tensor, labels: Tensor, first_class: int, parts: int) -> Tensor:
    """As hip_ops.reference.vocabulary_exponentials.overwrite_with_exponentials, whatever runs; logits of contiguous rows, parts of at most
    LARGEST_PART classes."""
    assert logits.stride(1) == 1 or logits.shape[1] < 2, f"logits have strides {logits.stride()}"
    assert part_size(logits.shape[1], parts) <= reference.LARGEST_PART, f"{logits.shape[1]} classes in {parts} parts"
    return version_for(_exponentials, logits)(logits, labels, first_class, parts)


@overwrite_with_exponentials.register_fake
def _(logits, labels, first_class, parts):
    return logits.new_empty((parts, 3, len(logits)), dtype=compute_dtype(logits))


@direct_operator("hip_ops::finish_gradient", mutates_args=("exponentials",))
def finish_gradient(
    exponentials: Tensor,
    labels: Tensor,
    first_class: int,
    statistics: Tensor,
    first_part: int,
    parts: int,
    grad: Tensor,
    z_loss: float,
) -> Tensor:
    """As hip_ops.reference.vocabulary_exponentials.finish_gradient, whatever runs."""
    assert exponentials.stride(1) == 1 or exponentials.shape[1] < 2, (
        f"exponentials have strides {exponentials.stride()}"
    )
    assert grad.dtype == statistics.dtype, (grad.dtype, statistics.dtype)
    assert 0 <= first_part <= len(statistics) - parts, (first_part, parts, len(statistics))
    return version_for(_finish, exponentials)(
        exponentials, labels, first_class, statistics, first_part, parts, grad, z_loss
    )


@finish_gradient.register_fake
def _(exponentials, labels, first_class, statistics, first_part, parts, grad, z_loss):
    return statistics.new_empty((2, len(exponentials)))
