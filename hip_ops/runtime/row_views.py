# SPDX-License-Identifier: Apache-2.0
"""Views of tensors as contiguous rows at any distance, as row kernels take them, and the grids of the HIP row
kernels.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from hip_ops.runtime.on_device import multiprocessors

ROWS_A_BLOCK = 4
BLOCKS_A_PROCESSOR = 32  # at most; beyond, a wave takes several rows
INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes


def as_rows(tensor: Tensor) -> Tensor:
    """Return [..., h] as [rows, h] with contiguous rows; a copy only where no such view exists."""
    if tensor.dim() == 2:
        flat = tensor
    elif tensor.dim() > 2:
        flat = tensor.flatten(0, -2)
    else:
        flat = tensor.reshape(math.prod(tensor.shape[:-1]), tensor.shape[-1])
    return flat if flat.stride(1) == 1 or flat.shape[1] < 2 else flat.contiguous()


def contiguous(*tensors: Tensor | None) -> list[Tensor | None]:
    return [None if tensor is None else tensor.contiguous() for tensor in tensors]


def empty_results(*tensors: Tensor | None, like: Tensor) -> list[Tensor]:
    """Return for each tensor an uninitialised one of its shape and dtype, contiguous; for None one without elements of
    the dtype of `like`.
    """
    return [
        torch.empty(0 if t is None else t.shape, dtype=(like if t is None else t).dtype, device=like.device)
        for t in tensors
    ]


def written_rows(tensor: Tensor) -> Tensor:
    """Return `tensor` [rows, h], which a kernel writes to. Raises ValueError where its rows are not contiguous.

    A copy, as `as_rows` makes one, would receive the results instead of the tensor.
    """
    if tensor.stride(1) != 1 and tensor.shape[1] > 1:
        raise ValueError(f"hip_ops: rows that are written to must be contiguous; strides are {tensor.stride()}")
    return tensor


def clear_rows_(rows: Tensor, kept: Tensor) -> Tensor:
    """Set rows [n, ...] to zero in place where kept int32 [n] is 0, also rows with NaN; kept is -1 for the other rows.

    It computes an integer `and` with kept: on a CPU masked_fill_ takes five times as long.
    """
    integer = INTEGERS[rows.element_size()]
    kept = kept.to(integer)
    rows.view(integer).bitwise_and_(kept if rows.dim() == 1 else kept.unsqueeze(-1))
    return rows


def starts_aligned(tensor: Tensor) -> bool:
    """Return whether each row of the last dimension starts at a multiple of 16 bytes."""
    starts = (tensor.data_ptr(), *(stride * tensor.element_size() for stride in tensor.stride()[:-1]))
    return not any(start % 16 for start in starts)


def aligned(*tensors: Tensor) -> bool:
    """Return whether each row of each tensor starts and ends at a multiple of 16 bytes."""
    return all(starts_aligned(t) and t.shape[1] * t.element_size() % 16 == 0 for t in tensors)


def blocks_for(rows: int, device: torch.device) -> int:
    """Return the blocks of a launch with one row per wave, up to a maximum. A CPU counts as one compute unit, so that
    its waves loop.
    """
    return min(-(-rows // ROWS_A_BLOCK), multiprocessors(device) * BLOCKS_A_PROCESSOR)


def rows_for_a_second(device: torch.device) -> int:
    """Return a number of rows, for the self-check's examples, of which some waves take a second one."""
    return ROWS_A_BLOCK * BLOCKS_A_PROCESSOR * multiprocessors(device) + 5
