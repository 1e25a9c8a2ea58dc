# SPDX-License-Identifier: Apache-2.0
"""Finds the expert and the tile that a Triton program computes, and makes tensor descriptors whose loads and stores end
at the end of an expert's rows. The experts' borders are read on the device, so the host never waits.

The hardware masks accesses beyond a descriptor's shape. The last rows of a range lie at the end of a dimension of
BORDER rows, and two more dimensions correct the address: with coordinates (BORDER, end, BORDER - size + row) and
strides (2^34 - stride, stride, stride) the offset is BORDER * 2^34 + (end - size + row) * stride elements, and
BORDER * 2^34 = 2^64 is 0 in 64-bit arithmetic. This is the method of triton.tools.ragged_tma, whose device functions
Triton's interpreter does not support.
"""

from __future__ import annotations

from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor

from hip_ops.runtime.descriptors import TensorDescriptor, descriptor

BORDER = tl.constexpr(2**30)
MAX_EXTENT = 0x7FFF0000


@triton.jit
def expert_borders(offsets, experts, EXPERTS: tl.constexpr):
    """Return the start and end of each expert's rows, [EXPERTS], a power of two; entries beyond `experts` have no
    rows.
    """
    expert = tl.arange(0, EXPERTS)
    ends = tl.load(offsets + tl.minimum(expert, experts - 1))
    starts = tl.load(offsets + tl.minimum(tl.maximum(expert - 1, 0), experts - 1))
    return tl.where(expert == 0, 0, starts), ends


@triton.jit
def outer_tiles(starts, ends, experts, tiles, ACCUMULATE: tl.constexpr, EXPERTS: tl.constexpr):
    """Return the tiles of each expert's result: `tiles`, or 0 for an expert without rows to add and for entries beyond
    the experts.
    """
    computed = tl.arange(0, EXPERTS) < experts
    if ACCUMULATE:
        computed = computed & (ends > starts)
    return computed.to(tl.int32) * tiles


@triton.jit
def find_expert(position, starts, ends, tile_ends):
    """Return the expert whose tile is at `position`, start and end of its rows, and the index among its tiles.

    tile_ends: the running sum of the experts' tiles. An expert without rows has the same value as the one before it, so
    it is skipped.
    """
    before = tile_ends <= position
    expert = tl.sum(before.to(tl.int32))
    first = tl.max(tl.where(before, tile_ends, 0))
    start = tl.max(tl.where(before, ends, 0))
    mine = (tl.arange(0, ends.shape[0]) == expert).to(tl.int32)
    return expert, start, tl.sum(mine * ends), position - first


def ragged_rows(x: Tensor, block: Sequence[int]) -> TensorDescriptor:
    """Return the descriptor of x [rows, columns] with contiguous rows; block: rows and columns of one load or
    store.
    """
    (rows, columns), (stride, one) = x.shape, x.stride()
    assert one == 1 and rows <= BORDER.value
    return descriptor(
        x, (MAX_EXTENT, MAX_EXTENT, BORDER.value, columns), (2**34 - stride, stride, stride, 1), (1, 1, *block)
    )


@triton.jit
def load_rows(desc, start, end, row, column, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Load x[start + row :, column :], with zeros from x[end] on."""
    return desc.load([BORDER, end, BORDER - (end - start) + row, column]).reshape(ROWS, COLUMNS)


@triton.jit
def store_rows(desc, start, end, row, column, block, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Store block to x[start + row :, column :], except rows from x[end] on."""
    desc.store([BORDER, end, BORDER - (end - start) + row, column], block.reshape(1, 1, ROWS, COLUMNS))
