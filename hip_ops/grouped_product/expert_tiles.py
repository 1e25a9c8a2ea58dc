# SPDX-License-Identifier: Apache-2.0
"""Finds the expert and the tile that a Triton program computes. The experts' borders are read on the device: the host never waits for them."""

import triton
import triton.language as tl


@triton.jit
def expert_borders(offsets, experts, EXPERTS: tl.constexpr):
    """Where each expert's rows start and end, [EXPERTS], a power of two; those beyond `experts` have none."""
    expert = tl.arange(0, EXPERTS)
    ends = tl.load(offsets + tl.minimum(expert, experts - 1))
    starts = tl.load(offsets + tl.minimum(tl.maximum(expert - 1, 0), experts - 1))
    return tl.where(expert == 0, 0, starts), ends


@triton.jit
def outer_tiles(starts, ends, experts, tiles, ACCUMULATE: tl.constexpr, EXPERTS: tl.constexpr):
    """Tiles of each expert's result: `tiles`, or 0 where there is nothing to add, or no expert."""
    computed = tl.arange(0, EXPERTS) < experts
    if ACCUMULATE:
        computed = computed & (ends > starts)
    return computed.to(tl.int32) * tiles


@triton.jit
def find_expert(position, starts, ends, tile_ends):
    """The expert whose tile is at `position`, where its rows start and end, and the place among its own tiles.

    tile_ends: the running sum of the experts' tiles. An expert without rows has the same as the one before it, so it is skipped.
    """
    before = tile_ends <= position
    expert = tl.sum(before.to(tl.int32))
    first = tl.max(tl.where(before, tile_ends, 0))
    start = tl.max(tl.where(before, ends, 0))
    mine = (tl.arange(0, ends.shape[0]) == expert).to(tl.int32)
    return expert, start, tl.sum(mine * ends), position - first
