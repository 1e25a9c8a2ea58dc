# SPDX-License-Identifier: Apache-2.0
"""Host side of csrc/vocabulary_rows.hip: allocates the results and calls the launchers. Same functions as hip_ops.reference.vocabulary_rows."""

from __future__ import annotations

import torch
from torch import Tensor

from hip_ops.hip_kernels.expert_permutation import aligned, blocks_for
from hip_ops.library import call
from hip_ops.reference.vocabulary_rows import part_size
from hip_ops.row_views import as_rows

GRADIENT_PARTS = 4  # of a row; nothing is summed there, so any number gives the same


def row_statistics(logits: Tensor, labels: Tensor, first_class: int, parts: int) -> Tensor:
    """As hip_ops.reference.vocabulary_rows.row_statistics."""
    device, (rows, classes) = logits.device, logits.shape
    statistics = torch.empty((parts, 3, rows), dtype=torch.float32, device=device)
    if rows:
        logits = as_rows(logits)
        call(
            "ho_row_statistics", logits, labels.contiguous(), statistics, rows, classes, logits.stride(0), first_class, parts,
            part_size(classes, parts), logits.element_size(), aligned(logits), blocks_for(rows, device), device=device,
        )
    return statistics


def overwrite_with_gradient(logits: Tensor, labels: Tensor, first_class: int, normalizer: Tensor, grad: Tensor, z_loss: float) -> None:
    """As hip_ops.reference.vocabulary_rows.overwrite_with_gradient; logits of contiguous rows."""
    device, (rows, classes) = logits.device, logits.shape
    if rows and classes:
        normalizer = as_rows(normalizer)
        call(
            "ho_overwrite_with_gradient", logits, labels.contiguous(), normalizer, grad.contiguous(), rows, classes, logits.stride(0),
            normalizer.stride(0), first_class, GRADIENT_PARTS, part_size(classes, GRADIENT_PARTS), z_loss, logits.element_size(), aligned(logits),
            blocks_for(rows, device), device=device,
        )
