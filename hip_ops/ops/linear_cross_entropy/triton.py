# SPDX-License-Identifier: Apache-2.0
"""The passes over rows of logits in Triton. No atomics.

A program computes a part of a row; where exponentials become gradients, a row. Same functions and conventions as
reference.py, on logits of contiguous rows. Importing this module imports triton.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from hip_ops.ops.linear_cross_entropy.reference import EXPONENT_PERIOD, MAX_EXPONENT, MAX_ROUNDED, part_size
from hip_ops.runtime.launch import WARP_SIZE, as_rows, run_kernel, written_rows


@triton.jit
def _part_of_row(size, classes):
    """Return the program's row and part, and the first class of the part and the one after its last."""
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    start = part * size
    return row, part, start, min(start + size, classes)


@triton.jit
def row_statistics_kernel(
    logits, labels, statistics, rows, classes, row_stride, first_class, size, LANES: tl.constexpr, WIDTH: tl.constexpr,
):
    """A lane keeps the running maximum and sum, WIDTH logits at a time: one exponential per logit, and one more per
    step.
    """
    row, part, start, end = _part_of_row(size, classes)
    offsets = tl.arange(0, LANES)[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    largest = tl.full([LANES], float("-inf"), tl.float32)
    total = tl.zeros([LANES], tl.float32)
    for at in range(start, end, LANES * WIDTH):
        column = at + offsets
        x = tl.load(logits + row * row_stride + column, mask=column < end, other=float("-inf")).to(tl.float32)
        top = tl.maximum(largest, tl.max(x, axis=1))
        shift = tl.where(top == float("-inf"), 0.0, top)  # no logit so far
        total = total * tl.exp(largest - shift) + tl.sum(tl.exp(x - shift[:, None]), axis=1)
        largest = top
    top = tl.max(largest, axis=0)
    shift = tl.where(top == float("-inf"), 0.0, top)
    total = tl.sum(total * tl.exp(largest - shift), axis=0)
    label = tl.load(labels + row) - first_class
    in_part = (label >= start) & (label < end)
    of_label = tl.load(logits + row * row_stride + label, mask=in_part, other=0.0).to(tl.float32)
    to = statistics + part.to(tl.int64) * 3 * rows + row
    tl.store(to, top)
    tl.store(to + rows, total)
    tl.store(to + 2 * rows, of_label)


@triton.jit
def row_gradient_kernel(
    logits, labels, normalizer, grad, classes, row_stride, normalizer_stride, first_class, size, z_loss,
    BLOCK: tl.constexpr,
):
    """Compute a part of a row, BLOCK logits at a time."""
    row, part, start, end = _part_of_row(size, classes)
    top = tl.load(normalizer + row)
    log_sum = tl.load(normalizer + normalizer_stride + row)
    upstream = tl.load(grad + row)
    label = tl.load(labels + row) - first_class
    factor = 1.0 + 2.0 * z_loss * (top + log_sum)
    for at in range(start, end, BLOCK):
        column = at + tl.arange(0, BLOCK)
        to = logits + row * row_stride + column
        x = tl.load(to, mask=column < end, other=0.0).to(tl.float32)
        d = tl.exp((x - top) - log_sum) * factor - tl.where(column == label, 1.0, 0.0)
        tl.store(to, (d * upstream).to(logits.dtype.element_ty), mask=column < end)


@triton.jit
def exponentials_kernel(
    logits, labels, statistics, rows, classes, row_stride, first_class, size, MAX_EXPONENT: tl.constexpr,
    EXPONENT_PERIOD: tl.constexpr, MAX_ROUNDED: tl.constexpr, BLOCK: tl.constexpr,
):
    """Keep a part of a row in registers between its maximum and its exponentials."""
    row, part, start, end = _part_of_row(size, classes)
    column = start + tl.arange(0, BLOCK)
    to = logits + row * row_stride + column
    x = tl.load(to, mask=column < end, other=float("-inf")).to(tl.float32)
    top = tl.max(x, axis=0)
    reference = tl.where(
        tl.abs(top) < MAX_ROUNDED, tl.ceil((top - MAX_EXPONENT) * (1.0 / EXPONENT_PERIOD)) * EXPONENT_PERIOD, top
    )
    e = tl.exp(x - tl.where(reference == float("-inf"), 0.0, reference))
    tl.store(to, e.to(logits.dtype.element_ty), mask=column < end)
    label = tl.load(labels + row) - first_class
    of_label = 0.0
    if (label >= start) & (label < end):  # not read from memory, which may hold the exponential already
        of_label = tl.sum(tl.where(column == label, x, 0.0), axis=0)
    at = statistics + part.to(tl.int64) * 3 * rows + row
    tl.store(at, reference)
    tl.store(at + rows, tl.sum(e, axis=0))
    tl.store(at + 2 * rows, of_label)


@triton.jit
def finish_gradient_kernel(
    exponentials, labels, statistics, grad, losses_and_factors, rows, classes, row_stride, first_class, size, all_parts,
    first_part, parts, z_loss, PARTS: tl.constexpr, BLOCK: tl.constexpr,
):
    """Compute a row's loss and factor, and finish its gradient. PARTS: a power of two, at least all_parts."""
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
    # Where the label has most of the sum, a difference of logarithms would lose the remainder.
    most = (of_label > 0.5 * total) & (of_label < 2.0 * total)
    loss = tl.where(most, tl.log(total / of_label), log_total - label_less)
    log_sum = shift + log_total
    factor = 1.0 + 2.0 * z_loss * log_sum
    tl.store(losses_and_factors + row, loss + z_loss * log_sum * log_sum)
    tl.store(losses_and_factors + rows + row, tl.load(grad + row) * factor / total)

    label = tl.load(labels + row) - first_class
    in_row = (label >= 0) & (label < classes)
    label = tl.where(in_row, label, 0)
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
        tl.debug_barrier()  # they may contain the label's exponential
    tl.store(row_start + label, (of_label - total / factor).to(exponentials.dtype.element_ty), mask=in_row)


@dataclass(frozen=True)
class StepTile:
    """The tile of a step, lanes x width logits, and its warps."""

    lanes: int
    width: int
    num_warps: int


def launch(element_bytes: int, warp_size: int) -> StepTile:
    """Choose the tile of row_statistics_kernel and row_gradient_kernel: 16 bytes per lane, twice a step.
    """
    return StepTile(2 * 256, 16 // element_bytes, 256 // warp_size)


def parts_of_gradient(classes: int) -> int:
    """Return the parts of a row in row_gradient_kernel. It has no sums, so the parts may be small enough to load all
    processors evenly.
    """
    return max(1, min(16, classes // 16384))


def tile(size: int, element_bytes: int, warp_size: int) -> tuple[int, int]:
    """Return block and warps of exponentials_kernel for a part of `size` classes: 16 bytes per lane, twice if the part
    is that large.
    """
    block = triton.next_power_of_2(size)
    return block, max(1, min(16, block * element_bytes // (2 * 16 * warp_size)))


def row_statistics(logits: Tensor, labels: Tensor, first_class: int, parts: int) -> Tensor:
    """As reference.row_statistics."""
    rows, classes = logits.shape
    statistics = torch.empty((parts, 3, rows), dtype=torch.float32, device=logits.device)
    logits, chosen = as_rows(logits), launch(logits.element_size(), WARP_SIZE)
    run_kernel(
        row_statistics_kernel, (rows, parts), logits, labels.contiguous(), statistics, rows, classes, logits.stride(0),
        first_class, part_size(classes, parts), LANES=chosen.lanes, WIDTH=chosen.width, num_warps=chosen.num_warps,
        device=logits.device,
    )
    return statistics


def overwrite_with_gradient(
    logits: Tensor, labels: Tensor, first_class: int, normalizer: Tensor, grad: Tensor, z_loss: float
) -> None:
    """As reference.overwrite_with_gradient."""
    rows, classes = logits.shape
    if classes:
        chosen, parts = launch(logits.element_size(), WARP_SIZE), parts_of_gradient(classes)
        normalizer = as_rows(normalizer)
        run_kernel(
            row_gradient_kernel, (rows, parts), written_rows(logits), labels.contiguous(), normalizer,
            grad.contiguous(), classes, logits.stride(0), normalizer.stride(0), first_class, part_size(classes, parts),
            z_loss, BLOCK=chosen.lanes * chosen.width, num_warps=chosen.num_warps, device=logits.device,
        )


def overwrite_with_exponentials(logits: Tensor, labels: Tensor, first_class: int, parts: int) -> Tensor:
    """As reference.overwrite_with_exponentials."""
    rows, classes = logits.shape
    statistics = torch.empty((parts, 3, rows), dtype=torch.float32, device=logits.device)
    size = part_size(classes, parts)
    block, warps = tile(size, logits.element_size(), WARP_SIZE)
    run_kernel(
        exponentials_kernel, (rows, parts), written_rows(logits), labels.contiguous(), statistics, rows, classes,
        logits.stride(0), first_class, size, MAX_EXPONENT=MAX_EXPONENT, EXPONENT_PERIOD=EXPONENT_PERIOD,
        MAX_ROUNDED=MAX_ROUNDED, BLOCK=block, num_warps=warps, device=logits.device,
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
    rows, classes = exponentials.shape
    losses_and_factors = torch.empty((2, rows), dtype=torch.float32, device=exponentials.device)
    run_kernel(
        finish_gradient_kernel, (rows,), written_rows(exponentials), labels.contiguous(), statistics.contiguous(),
        grad.contiguous(), losses_and_factors, rows, classes, exponentials.stride(0), first_class,
        part_size(classes, parts), len(statistics), first_part, parts, z_loss,
        PARTS=triton.next_power_of_2(len(statistics)), BLOCK=1024, num_warps=4 if torch.version.hip is None else 2,
        device=exponentials.device,
    )
    return losses_and_factors
