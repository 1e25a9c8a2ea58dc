# SPDX-License-Identifier: Apache-2.0
"""Host side of expert_sort.hip and expert_rows.hip: allocates the results and calls the launchers.

Same functions as reference.py. The sources choose the kernel: 16 bytes per lane if all rows are
aligned to 16 bytes.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hip_ops.runtime.launch import as_rows, contiguous, empty_results
from hip_ops.runtime.launchers import call, call_rows, library, target_of


def sort_by_expert(expert_ids: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """As reference.sort_by_expert; num_experts up to 256."""
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
    """As reference.gather_rows."""
    device, (count, hidden) = rows.device, rows.shape
    out, moved_probs = empty_results(rows, probs, like=rows)
    rows, (index, probs) = as_rows(rows), contiguous(index, probs)
    call_rows(
        "ho_gather_rows", rows, index, probs, out, moved_probs, count, hidden, rows.stride(0), rows.element_size(),
        0 if probs is None else probs.element_size(), wide=(rows, out), device=device,
    )
    return out, moved_probs
