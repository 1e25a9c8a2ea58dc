# SPDX-License-Identifier: Apache-2.0
"""Row statistics of logits, and logits overwritten with their gradient, in Triton: a program a part of a row. No atomics.

Same functions and conventions as hip_ops.reference.vocabulary_rows. Importing this module imports triton.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from hip_ops.reference.vocabulary_rows import part_size
from hip_ops.row_views import as_rows
from hip_ops.triton_kernels.on_device import on


@triton.jit
def row_statistics_kernel(
    logits, labels, statistics, rows, classes, row_stride, first_class, size, LANES: tl.constexpr, WIDTH: tl.constexpr,
):
    """A lane keeps maximum and sum of what it saw, WIDTH logits at a time: one exponential a logit, and one more a step."""
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    start = part * size
    end = min(start + size, classes)
    offsets = tl.arange(0, LANES)[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    largest = tl.full([LANES], float("-inf"), tl.float32)
    total = tl.zeros([LANES], tl.float32)
    for at in range(start, end, LANES * WIDTH):
        column = at + offsets
        x = tl.load(logits + row * row_stride + column, mask=column < end, other=float("-inf")).to(tl.float32)
        top = tl.maximum(largest, tl.max(x, axis=1))
        shift = tl.where(top == float("-inf"), 0.0, top)  # nothing seen yet
        total = total * tl.exp(largest - shift) + tl.sum(tl.exp(x - shift[:, None]), axis=1)
        largest = top
    top = tl.max(largest, axis=0)
    shift = tl.where(top == float("-inf"), 0.0, top)
    total = tl.sum(total * tl.exp(largest - shift), axis=0)
    label = tl.load(labels + row) - first_class
    here = (label >= start) & (label < end)
    of_label = tl.load(logits + row * row_stride + label, mask=here, other=0.0).to(tl.float32)
    to = statistics + part.to(tl.int64) * 3 * rows + row
    tl.store(to, top)
    tl.store(to + rows, total)
    tl.store(to + 2 * rows, of_label)


@triton.jit
def row_gradient_kernel(
    logits, labels, normalizer, grad, classes, row_stride, normalizer_stride, first_class, size, z_loss, BLOCK: tl.constexpr,
):
    """Part of a row, BLOCK logits at a time."""
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    start = part * size
    end = min(start + size, classes)
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


@dataclass(frozen=True)
class Launch:
    """The tile of a step, lanes x width logits, and its warps."""

    lanes: int
    width: int
    num_warps: int


def launch(element_bytes: int, warp_size: int | None = None) -> Launch:
    """Of both kernels: 16 bytes a lane at a time, twice a step. warp_size None for this torch's kind of device."""
    warp_size = warp_size or (32 if torch.version.hip is None else 64)
    return Launch(2 * 256, 16 // element_bytes, 256 // warp_size)


def row_statistics(logits: Tensor, labels: Tensor, first_class: int, parts: int) -> Tensor:
    """As hip_ops.reference.vocabulary_rows.row_statistics."""
    rows, classes = logits.shape
    statistics = torch.empty((parts, 3, rows), dtype=torch.float32, device=logits.device)
    if rows:
        logits, chosen = as_rows(logits), launch(logits.element_size())
        with on(logits.device):
            row_statistics_kernel[(rows, parts)](
                logits, labels.contiguous(), statistics, rows, classes, logits.stride(0), first_class, part_size(classes, parts),
                LANES=chosen.lanes, WIDTH=chosen.width, num_warps=chosen.num_warps,
            )
    return statistics


def overwrite_with_gradient(logits: Tensor, labels: Tensor, first_class: int, normalizer: Tensor, grad: Tensor, z_loss: float) -> None:
    """As hip_ops.reference.vocabulary_rows.overwrite_with_gradient; logits of contiguous rows."""
    rows, classes = logits.shape
    if rows and classes:
        chosen, parts, normalizer = launch(logits.element_size()), parts_of_gradient(classes), as_rows(normalizer)
        with on(logits.device):
            row_gradient_kernel[(rows, parts)](
                logits, labels.contiguous(), normalizer, grad.contiguous(), classes, logits.stride(0), normalizer.stride(0), first_class,
                part_size(classes, parts), z_loss, BLOCK=chosen.lanes * chosen.width, num_warps=chosen.num_warps,
            )


def parts_of_gradient(classes: int) -> int:
    """Nothing is summed there, so that a row may have as many parts as keep all processors busy to the end."""
    return max(1, min(16, classes // 16384))
