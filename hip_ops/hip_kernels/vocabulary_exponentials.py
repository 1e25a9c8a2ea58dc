# SPDX-License-Identifier: Apache-2.0
"""Host side of csrc/vocabulary_exponentials.hip: allocates the results and calls the launchers. Same functions as
hip_ops.reference.vocabulary_exponentials."""

from __future__ import annotations

import torch
from torch import Tensor

from hip_ops.hip_kernels.expert_permutation import aligned, blocks_for
from hip_ops.library import call
from hip_ops.reference.vocabulary_rows import part_size


def overwrite_with_exponentials(logits: Tensor, labels: Tensor, first_class: int, parts: int) -> Tensor:
    """As hip_ops.reference.vocabulary_exponentials.overwrite_with_exponentials; logits of contiguous rows."""
    device, (rows, classes) = logits.device, logits.shape
    statistics = torch.empty((parts, 3, rows), dtype=torch.float32, device=device)
    if rows:
        call(
            "ho_overwrite_with_exponentials", logits, labels.contiguous(), statistics, rows, classes, logits.stride(0), first_class, parts,
            part_size(classes, parts), logits.element_size(), aligned(logits), blocks_for(rows, device), device=device,
        )
    return statistics


def finish_gradient(exponentials: Tensor, labels: Tensor, first_class: int, statistics: Tensor, first_part: int, parts: int, grad: Tensor, z_loss: float) -> Tensor:
    """As hip_ops.reference.vocabulary_exponentials.finish_gradient; exponentials of contiguous rows."""
    device, (rows, classes) = exponentials.device, exponentials.shape
    found = torch.empty((2, rows), dtype=torch.float32, device=device)
    if rows:
        call(
            "ho_finish_gradient", exponentials, labels.contiguous(), statistics.contiguous(), grad.contiguous(), found, rows, classes,
            exponentials.stride(0), first_class, part_size(classes, parts), len(statistics), first_part, parts, z_loss, exponentials.element_size(),
            aligned(exponentials), blocks_for(rows, device), device=device,
        )
    return found
