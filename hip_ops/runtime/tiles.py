# SPDX-License-Identifier: Apache-2.0
"""Orders of output tiles over Triton programs, as in hip_ops/ops/newton_schulz/tile_order.h."""

import triton
import triton.language as tl


@triton.jit
def xcd_contiguous(position, total, XCDS: tl.constexpr):
    """Map [0, total) to itself so that each XCD gets one contiguous run; an MI300X distributes programs over its XCDs
    round-robin.
    """
    if XCDS == 1:
        return position
    xcd = position % XCDS
    return xcd * (total // XCDS) + min(xcd, total % XCDS) + position // XCDS


@triton.jit
def triangle_tile(position, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """Return row and column of the tile at `position` of the lower triangle in row order; float32 square roots are
    corrected exactly.
    """
    if BLOCK_M == BLOCK_N:  # row i has i + 1 tiles, i (i + 1) / 2 before it
        row = ((tl.sqrt(8.0 * position.to(tl.float32) + 1.0) - 1.0) * 0.5).to(tl.int32)
        row = tl.where(row * (row + 1) // 2 > position, row - 1, row)
        row = tl.where((row + 1) * (row + 2) // 2 <= position, row + 1, row)
        return row, position - row * (row + 1) // 2
    pair = ((tl.sqrt(4.0 * position.to(tl.float32) + 1.0) - 1.0) * 0.5).to(tl.int32)
    pair = tl.where(pair * (pair + 1) > position, pair - 1, pair)
    pair = tl.where((pair + 1) * (pair + 2) <= position, pair + 1, pair)
    rest = position - pair * (pair + 1)
    if BLOCK_M > BLOCK_N:  # row i has 2 i + 2 tiles
        return pair, rest
    return 2 * pair + rest // (pair + 1), rest % (pair + 1)  # rows 2 i and 2 i + 1 have i + 1 tiles each


@triton.jit
def grouped_tile(position, tile_rows, tile_columns, GROUP: tl.constexpr):
    """Return row and column in a full grid, in bands of GROUP tile rows, column by column."""
    band = position // (GROUP * tile_columns)
    first = band * GROUP
    height = min(tile_rows - first, GROUP)
    position -= first * tile_columns
    return first + position % height, position // height
