# SPDX-License-Identifier: Apache-2.0
"""Host side of csrc/expert_sort.hip and csrc/expert_rows.hip: allocates the results and calls the launchers.

Same functions as hip_ops.reference.expert_permutation. The sources choose the kernel: 16 bytes a lane where all rows are aligned to that.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hip_ops.library import call, library, target_of
from hip_ops.row_views import as_rows

MAX_EXPERTS = 256
ROWS_A_BLOCK = 4
BLOCKS_A_PROCESSOR = 32  # at most; then a wave goes on to further rows


def aligned(*tensors: Tensor) -> bool:
    """Whether each row of each tensor starts and ends at a multiple of 16 bytes."""
    return all(
        t.data_ptr() % 16 == 0 and t.stride(0) * t.element_size() % 16 == 0 and t.shape[1] * t.element_size() % 16 == 0 for t in tensors
    )


def blocks_for(rows: int, device: torch.device) -> int:
    """A wave a row, as far as there are blocks; a CPU counts as one compute unit, so that its waves go on to further rows."""
    processors = torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1
    return min(-(-rows // ROWS_A_BLOCK), processors * BLOCKS_A_PROCESSOR)


def sort_by_expert(expert_ids: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """As hip_ops.reference.expert_permutation.sort_by_expert."""
    if num_experts > MAX_EXPERTS:
        raise ValueError(
            f"hip_ops.sort_by_expert: num_experts is {num_experts}; the HIP kernels take at most {MAX_EXPERTS}, HIP_OPS_BACKEND=torch has no limit"
        )
    tokens, device = len(expert_ids), expert_ids.device
    token_of_row, row_of_token = (torch.empty(tokens, dtype=torch.int32, device=device) for _ in range(2))
    counts, offsets = ((torch.empty if tokens else torch.zeros)(num_experts, dtype=torch.int32, device=device) for _ in range(2))
    if tokens:
        blocks = library(target_of(device)).ho_expert_sort_blocks(tokens, num_experts)
        counted = torch.empty((blocks, num_experts + 1), dtype=torch.int32, device=device)
        call(
            "ho_expert_sort", expert_ids.contiguous(), counted, token_of_row, row_of_token, counts, offsets, tokens, num_experts,
            expert_ids.element_size(), device=device,
        )
    return token_of_row, row_of_token, counts, offsets


def gather_rows(source: Tensor, index: Tensor, side: Tensor | None) -> tuple[Tensor, Tensor]:
    """As hip_ops.reference.expert_permutation.gather_rows."""
    device, (count, hidden) = source.device, source.shape
    out = torch.empty((count, hidden), dtype=source.dtype, device=device)
    side_out = torch.empty(0 if side is None else count, dtype=source.dtype if side is None else side.dtype, device=device)
    if count:
        source, side = as_rows(source), None if side is None else side.contiguous()
        call(
            "ho_gather_rows", source, index.contiguous(), side, out, side_out, count, hidden, source.stride(0), source.element_size(),
            0 if side is None else side.element_size(), aligned(source, out), blocks_for(count, device), device=device,
        )
    return out, side_out


def scale_gather_rows(source: Tensor, index: Tensor, scale: Tensor) -> Tensor:
    """As hip_ops.reference.expert_permutation.scale_gather_rows."""
    device, (count, hidden) = source.device, source.shape
    out = torch.empty((count, hidden), dtype=source.dtype, device=device)
    if count:
        source = as_rows(source)
        call(
            "ho_scale_gather_rows", source, index.contiguous(), scale.contiguous(), out, count, hidden, source.stride(0),
            source.element_size(), scale.element_size(), aligned(source, out), blocks_for(count, device), device=device,
        )
    return out


def scale_gather_rows_backward(grad: Tensor, source: Tensor, inverse: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """As hip_ops.reference.expert_permutation.scale_gather_rows_backward."""
    device, (count, hidden) = source.device, source.shape
    d_source, d_scale = torch.empty((count, hidden), dtype=source.dtype, device=device), torch.empty(count, dtype=scale.dtype, device=device)
    if count:
        grad, source = as_rows(grad), as_rows(source)
        call(
            "ho_scale_gather_rows_backward", grad, source, inverse.contiguous(), scale.contiguous(), d_source, d_scale, count, hidden,
            grad.stride(0), source.stride(0), source.element_size(), scale.element_size(), aligned(grad, source, d_source),
            blocks_for(count, device), device=device,
        )
    return d_source, d_scale
