// SPDX-License-Identifier: Apache-2.0
// Maps blocks to output tiles.
//
// MI300X dispatches consecutive blocks to its 8 XCDs round-robin (block id % 8), and each XCD has its own L2. Tiles in id order would
// therefore spread neighbours, which share operand rows, over all eight caches. `xcd_contiguous` gives each XCD one contiguous run of
// the tile sequence instead. Within the sequence, tiles of kSuperRows block rows come column by column, so that the blocks that run
// together on an XCD form a near-square patch and reuse both operands.
#pragma once
#include "portable.h"

constexpr int kXcds = 8;
constexpr int kSuperRows = 8;

// A bijection of [0, total): block id -> position in the tile sequence.
__device__ __forceinline__ int xcd_contiguous(int id, int total) {
    const int xcd = id % kXcds, share = total / kXcds, longer = total % kXcds;
    return xcd * share + (xcd < longer ? xcd : longer) + id / kXcds;
}

struct TileIndex {
    int row, column;
};

// Position in [0, rows*(rows+1)/2) -> tile of the lower triangle, diagonal included. Integer loops instead of a square root:
// they are exact for every size and run once per block on the scalar unit.
__device__ __forceinline__ TileIndex lower_triangle_tile(int position, int rows) {
    int first = 0, height = rows < kSuperRows ? rows : kSuperRows;
    while (position >= height * first + height * (height + 1) / 2) {
        position -= height * first + height * (height + 1) / 2;
        first += height;
        height = rows - first < kSuperRows ? rows - first : kSuperRows;
    }
    if (position < height * first) return TileIndex{first + position % height, position / height};
    position -= height * first;
    int row = 0;
    while (position > row) position -= ++row;
    return TileIndex{first + row, first + position};
}

// Position in [0, rows*columns) -> tile of the full grid.
__device__ __forceinline__ TileIndex full_grid_tile(int position, int rows, int columns) {
    const int first = position / (kSuperRows * columns) * kSuperRows;
    const int height = rows - first < kSuperRows ? rows - first : kSuperRows;
    position -= first * columns;
    return TileIndex{first + position % height, position / height};
}
