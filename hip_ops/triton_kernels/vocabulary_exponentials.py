# SPDX-License-Identifier: Apache-2.0
"""Logits overwritten with exponentials and their sums in one pass, a program a part of a row, and what makes gradients of them, a program a row,
in Triton. No atomics.

Same functions and conventions as hip_ops.reference.vocabulary_exponentials. Importing this module imports triton.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from hip_ops.reference.vocabulary_exponentials import LARGE, MOST, PERIOD
from hip_ops.reference.vocabulary_rows import part_size
from hip_ops.triton_kernels.on_device import on


@triton.jit
def exponentials_kernel(
    logits, labels, statistics, rows, classes, row_stride, first_class, size, MOST: tl.constexpr, PERIOD: tl.constexpr,
    LARGE: tl.constexpr, BLOCK: tl.constexpr,
):
    """A part of a row stays in registers between its maximum and its exponentials."""
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    start = part * size
    end = min(start + size, classes)
    column = start + tl.arange(0, BLOCK)
    to = logits + row * row_stride + column
    x = tl.load(to, mask=column < end, other=float("-inf")).to(tl.float32)
    top = tl.max(x, axis=0)
    reference = tl.where(tl.abs(top) < LARGE, tl.ceil((top - MOST) * (1.0 / PERIOD)) * PERIOD, top)
    e = tl.exp(x - tl.where(reference == float("-inf"), 0.0, reference))
    tl.store(to, e.to(logits.dtype.element_ty), mask=column < end)
    label = tl.load(labels + row) - first_class
    of_label = 0.0
    if (label >= start) & (label < end):  # not read from memory, where the exponential may be by now
        of_label = tl.sum(tl.where(column == label, x, 0.0), axis=0)
    at = statistics + part.to(tl.int64) * 3 * rows + row
    tl.store(at, reference)
    tl.store(at + rows, tl.sum(e, axis=0))
    tl.store(at + 2 * rows, of_label)


@triton.jit
def finish_gradient_kernel(
    exponentials, labels, statistics, grad, found, rows, classes, row_stride, first_class, size, all_parts, first_part, parts, z_loss,
    PARTS: tl.constexpr, BLOCK: tl.constexpr,
):
    """PARTS: a power of two, at least all_parts."""
    row = tl.program_id(0).to(tl.int64)
    part = tl.arange(0, PARTS)
    at = statistics + part.to(tl.int64) * 3 * rows + row
    reference = tl.load(at, mask=part < all_parts, other=float("-inf"))
    largest = tl.max(reference, axis=0)
    shift = tl.where(largest == float("-inf"), 0.0, largest)
    total = tl.sum(tl.load(at + rows, mask=part < all_parts, other=0.0) * tl.exp(reference - shift), axis=0)
    label_less = tl.sum(tl.load(at + 2 * rows, mask=part < all_parts, other=0.0), axis=0) - shift
    of_label = tl.exp(label_less)
    log_total = tl.log(total)
    # Where the label has most of the sum, a difference of logarithms would lose what the rest is.
    most = (of_label > 0.5 * total) & (of_label < 2.0 * total)
    loss = tl.where(most, tl.log(total / of_label), log_total - label_less)
    log_sum = shift + log_total
    factor = 1.0 + 2.0 * z_loss * log_sum
    tl.store(found + row, loss + z_loss * log_sum * log_sum)
    tl.store(found + rows + row, tl.load(grad + row) * factor / total)

    label = tl.load(labels + row) - first_class
    here = (label >= 0) & (label < classes)
    label = tl.where(here, label, 0)
    row_start = exponentials + row * row_stride
    mine = (part >= first_part) & (part < first_part + parts)
    if tl.max((mine & (reference != shift)).to(tl.int32), axis=0) > 0:  # rare
        for number in range(parts):
            of_part = tl.load(statistics + (first_part + number).to(tl.int64) * 3 * rows + row)
            if of_part != shift:
                scale = tl.exp(of_part - shift)
                end = min((number + 1) * size, classes)
                for begin in range(number * size, end, BLOCK):
                    column = begin + tl.arange(0, BLOCK)
                    x = tl.load(row_start + column, mask=column < end, other=0.0).to(tl.float32) * scale
                    tl.store(row_start + column, x.to(exponentials.dtype.element_ty), mask=column < end)
        tl.debug_barrier()  # the label's may be among them
    tl.store(row_start + label, (of_label - total / factor).to(exponentials.dtype.element_ty), mask=here)


def overwrite_with_exponentials(logits: Tensor, labels: Tensor, first_class: int, parts: int) -> Tensor:
    """As hip_ops.reference.vocabulary_exponentials.overwrite_with_exponentials; logits of contiguous rows."""
    rows, classes = logits.shape
    statistics = torch.empty((parts, 3, rows), dtype=torch.float32, device=logits.device)
    if rows:
        size = part_size(classes, parts)
        block, warps = tile(size, logits.element_size())
        with on(logits.device):
            exponentials_kernel[(rows, parts)](
                logits, labels.contiguous(), statistics, rows, classes, logits.stride(0), first_class, size, MOST=MOST, PERIOD=PERIOD, LARGE=LARGE,
                BLOCK=block, num_warps=warps,
            )
    return statistics


def finish_gradient(exponentials: Tensor, labels: Tensor, first_class: int, statistics: Tensor, first_part: int, parts: int, grad: Tensor, z_loss: float) -> Tensor:
    """As hip_ops.reference.vocabulary_exponentials.finish_gradient; exponentials of contiguous rows."""
    rows, classes = exponentials.shape
    found = torch.empty((2, rows), dtype=torch.float32, device=exponentials.device)
    if rows:
        with on(exponentials.device):
            finish_gradient_kernel[(rows,)](
                exponentials, labels.contiguous(), statistics.contiguous(), grad.contiguous(), found, rows, classes, exponentials.stride(0), first_class,
                part_size(classes, parts), len(statistics), first_part, parts, z_loss, PARTS=triton.next_power_of_2(len(statistics)), BLOCK=1024,
                num_warps=4 if torch.version.hip is None else 2,
            )
    return found


def tile(size: int, element_bytes: int, warp_size: int | None = None) -> tuple[int, int]:
    """Block of a part of `size` classes, and its warps: 16 bytes a lane twice, where there are as many. warp_size None for this torch's kind of device."""
    warp_size = warp_size or (32 if torch.version.hip is None else 64)
    block = triton.next_power_of_2(size)
    return block, max(1, min(16, block * element_bytes // (2 * 16 * warp_size)))
