# SPDX-License-Identifier: Apache-2.0
"""Host side of expert_sort.hip and expert_rows.hip: allocates the results and calls the launchers.

Same functions as hip_ops.ops.expert_permutation.reference. The sources choose the kernel: 16 bytes per lane if all rows are
aligned to 16 bytes.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hip_ops.runtime.library import call, library, target_of
from hip_ops.runtime.row_views import aligned, as_rows, blocks_for


def sort_by_expert(expert_ids: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """As hip_ops.ops.expert_permutation.reference.sort_by_expert; num_experts up to 256."""
    tokens, device = len(expert_ids), expert_ids.device
    token_of_row, row_of_token = (torch.empty(tokens, dtype=torch.int32, device=device) for _ in range(2))
    counts, offsets = (
        (torch.empty if tokens else torch.zeros)(num_experts, dtype=torch.int32, device=device) for _ in range(2)
    )
    if tokens:
        blocks = library(target_of(device)).ho_expert_sort_blocks(tokens, num_experts)
        counted = torch.empty((blocks, num_experts + 1), dtype=torch.int32, device=device)
        call(
            "ho_expert_sort", expert_ids.contiguous(), counted, token_of_row, row_of_token, counts, offsets, tokens,
            num_experts, expert_ids.element_size(), device=device,
        )
    return token_of_row, row_of_token, counts, offsets


def gather_rows(rows: Tensor, index: Tensor, inverse: Tensor, probs: Tensor | None) -> tuple[Tensor, Tensor]:
    """As hip_ops.ops.expert_permutation.reference.gather_rows."""
    device, (count, hidden) = rows.device, rows.shape
    out = torch.empty((count, hidden), dtype=rows.dtype, device=device)
    moved_probs = torch.empty(
        0 if probs is None else count, dtype=rows.dtype if probs is None else probs.dtype, device=device
    )
    if count:
        rows, probs = as_rows(rows), None if probs is None else probs.contiguous()
        call(
            "ho_gather_rows", rows, index.contiguous(), probs, out, moved_probs, count, hidden, rows.stride(0),
            rows.element_size(), 0 if probs is None else probs.element_size(), aligned(rows, out),
            blocks_for(count, device), device=device,
        )
    return out, moved_probs
