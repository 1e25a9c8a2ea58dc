# SPDX-License-Identifier: Apache-2.0
"""Host side of vocabulary_rows.hip and vocabulary_exponentials.hip: allocates the results and calls the launchers.

Same functions as reference.py, on logits of contiguous rows.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hip_ops.ops.linear_cross_entropy.reference import part_size
from hip_ops.runtime.launch import as_rows, written_rows
from hip_ops.runtime.launchers import call_rows

GRADIENT_PARTS = 4  # of a row; the pass has no sums, so every number gives the same result


def row_statistics(logits: Tensor, labels: Tensor, first_class: int, parts: int) -> Tensor:
    """As reference.row_statistics."""
    device, (rows, classes) = logits.device, logits.shape
    statistics = torch.empty((parts, 3, rows), dtype=torch.float32, device=device)
    logits = as_rows(logits)
    call_rows(
        "ho_row_statistics", logits, labels.contiguous(), statistics, rows, classes, logits.stride(0), first_class,
        parts, part_size(classes, parts), logits.element_size(), wide=(logits,), device=device,
    )
    return statistics


def overwrite_with_gradient(
    logits: Tensor, labels: Tensor, first_class: int, normalizer: Tensor, grad: Tensor, z_loss: float
) -> None:
    """As reference.overwrite_with_gradient."""
    device, (rows, classes) = logits.device, logits.shape
    if classes:
        normalizer = as_rows(normalizer)
        call_rows(
            "ho_overwrite_with_gradient", written_rows(logits), labels.contiguous(), normalizer, grad.contiguous(),
            rows, classes, logits.stride(0), normalizer.stride(0), first_class, GRADIENT_PARTS,
            part_size(classes, GRADIENT_PARTS), z_loss, logits.element_size(), wide=(logits,), device=device,
        )


def overwrite_with_exponentials(logits: Tensor, labels: Tensor, first_class: int, parts: int) -> Tensor:
    """As reference.overwrite_with_exponentials."""
    device, (rows, classes) = logits.device, logits.shape
    statistics = torch.empty((parts, 3, rows), dtype=torch.float32, device=device)
    call_rows(
        "ho_overwrite_with_exponentials", written_rows(logits), labels.contiguous(), statistics, rows, classes,
        logits.stride(0), first_class, parts, part_size(classes, parts), logits.element_size(), wide=(logits,),
        device=device,
    )
    return statistics


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
    """As reference.finish_gradient."""
    device, (rows, classes) = exponentials.device, exponentials.shape
    losses_and_factors = torch.empty((2, rows), dtype=torch.float32, device=device)
    call_rows(
        "ho_finish_gradient", written_rows(exponentials), labels.contiguous(), statistics.contiguous(),
        grad.contiguous(), losses_and_factors, rows, classes, exponentials.stride(0), first_class,
        part_size(classes, parts), len(statistics), first_part, parts, z_loss, exponentials.element_size(),
        wide=(exponentials,), device=device,
    )
    return losses_and_factors
