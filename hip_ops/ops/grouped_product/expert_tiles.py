# SPDX-License-Identifier: Apache-2.0
"""Finds the expert and the tile that a Triton program computes. It reads the experts' borders on the device, so the
host never waits.
"""

import triton
import triton.language as tl


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
