# SPDX-License-Identifier: Apache-2.0
"""Adds rows to the rows of a large matrix by their ids, in Triton. No atomics: rows are taken in the order of their
ids.

A program takes RUN rows in that order and sums those of one id. The sum of an id whose rows all belong to the program
is added to the matrix. The sum of an id that other programs share is stored as a partial sum; in the second launch the
program where the id begins adds up its partial sums. So every row of the matrix is read and written once, by one
program.

Same function as hip_ops.ops.embedding_gradient.reference. Importing this module imports triton.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from hip_ops.runtime.launch import WARP_SIZE, as_rows, run_kernel

RUN = 32  # rows per program
AT_ONCE = 8  # partial sums of one id that are read at a time


@triton.jit
def add_runs_kernel(
    total, ids, order, rows, heads, tails, count, width, total_stride, rows_stride, RUN: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Sum rows by id. ids in ascending order, order: the row of each. heads, tails [programs, width]: partial sums of
    the first and last id of a program that other programs share."""
    part = tl.program_id(0)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    start = part * RUN
    end = min(start + RUN, count)
    of_part = part.to(tl.int64) * width + column
    id = tl.load(ids + start)
    continued = (tl.load(ids + start - 1, mask=start > 0, other=-1) == id).to(tl.int32)
    sums = tl.zeros([BLOCK], tl.float32)
    for at in range(start, end):
        row = tl.load(order + at)
        sums += tl.load(rows + row * rows_stride + column, mask=inside, other=0.0).to(tl.float32)
        following = tl.load(ids + at + 1, mask=at + 1 < count, other=-1)
        # masks instead of branches, which Triton 3.6 fails to compile where sizes are multiples of 16
        ends = (following != id).to(tl.int32)
        to_total, to_head = ends * (1 - continued), tl.maximum(ends, (at + 1 == end).to(tl.int32)) * continued
        to_tail = (at + 1 == end).to(tl.int32) * (1 - ends) * (1 - continued)
        to = total + id * total_stride + column
        now = tl.load(to, mask=inside & (to_total > 0), other=0.0).to(tl.float32)
        tl.store(to, (now + sums).to(total.dtype.element_ty), mask=inside & (to_total > 0))
        tl.store(heads + of_part, sums, mask=inside & (to_head > 0))
        tl.store(tails + of_part, sums, mask=inside & (to_tail > 0))
        sums = tl.where(ends > 0, 0.0, sums)
        continued *= 1 - ends
        id = following


@triton.jit
def join_runs_kernel(
    total, ids, heads, tails, count, width, total_stride, RUN: tl.constexpr, AT_ONCE: tl.constexpr, BLOCK: tl.constexpr,
):
    """Add the partial sums of the id that begins in this part and continues after it, if there is one."""
    part = tl.program_id(0)
    start, end = part * RUN, (part + 1) * RUN
    id = tl.load(ids + end - 1, mask=end <= count, other=-1)
    goes_on = (end < count) & (tl.load(ids + end, mask=end < count, other=-2) == id)
    began_before = (start > 0) & (tl.load(ids + start - 1, mask=start > 0, other=-3) == id)
    if goes_on & (began_before == 0):
        column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        inside = column < width
        sums = tl.load(tails + part.to(tl.int64) * width + column, mask=inside, other=0.0)
        number = part + 1
        more = goes_on
        while more:
            parts = number + tl.arange(0, AT_ONCE)
            # ids ascend, so if a part begins with this id, so do all parts between
            mine = tl.load(ids + parts * RUN, mask=parts * RUN < count, other=-1) == id
            place = parts.to(tl.int64)[:, None] * width + column[None, :]
            sums += tl.sum(tl.load(heads + place, mask=mine[:, None] & inside[None, :], other=0.0), axis=0)
            more = tl.min(mine.to(tl.int32), axis=0) > 0
            number += AT_ONCE
        to = total + id * total_stride + column
        tl.store(
            to, (tl.load(to, mask=inside, other=0.0).to(tl.float32) + sums).to(total.dtype.element_ty), mask=inside
        )


def add_rows_(total: Tensor, ids: Tensor, rows: Tensor) -> None:
    """As reference.add_rows_; total of contiguous rows."""
    count, width = rows.shape
    if count == 0 or width == 0:
        return
    in_order, order = ids.sort(stable=True)
    parts, block = triton.cdiv(count, RUN), columns_of_block(width)
    rows = as_rows(rows)
    heads, tails = torch.empty((2, parts, width), dtype=torch.float32, device=rows.device)
    grid = (parts, triton.cdiv(width, block))
    run_kernel(
        add_runs_kernel, grid, total, in_order, order, rows, heads, tails, count, width, total.stride(0),
        rows.stride(0), RUN=RUN, BLOCK=block, num_warps=warps(block, WARP_SIZE), device=rows.device,
    )
    run_kernel(
        join_runs_kernel, grid, total, in_order, heads, tails, count, width, total.stride(0), RUN=RUN, AT_ONCE=AT_ONCE,
        BLOCK=block, num_warps=warps(block, WARP_SIZE), device=rows.device,
    )


def columns_of_block(width: int) -> int:
    """Return the columns per program: at most 16 bytes of bf16 per lane of four NVIDIA warps."""
    return min(1024, triton.next_power_of_2(width))


def warps(block: int, warp_size: int) -> int:
    """Return the number of warps."""
    return max(1, block // 8 // warp_size)
