// SPDX-License-Identifier: Apache-2.0
// Stores accumulators: alpha, beta * D, gamma on the diagonal, one rounding, then the tile and its mirror image, both in 16-byte
// stores that are contiguous along their rows.
//
// The tile passes through LDS as rows of 64*kFrag elements. Chunk c of 16 bytes of row r sits at c ^ (r % 16) (% 8 for the small tile),
// with its halves exchanged where r / 8 is odd: then the 16 rows that a phase of an 8-byte access reaches lie in different banks. A lane
// holds four consecutive columns of a row, so the tile itself is written 8 bytes at a time and its transpose 2 bytes at a time.
#pragma once
#include "product_tile.h"

template <int kFrag>
struct ResultTile {
    static constexpr int kRows = 64 * kFrag, kChunks = kRows / 8;
    uint16_t* lds;

    __device__ __forceinline__ uint16_t* at(int row, int column) const {
        return lds + row * kRows + ((column / 8) ^ (row % kChunks)) * 8 + (column % 8 ^ row / 8 % 2 * 4);
    }
    __device__ __forceinline__ bf16x8* chunk_at(int row, int chunk) const {
        return reinterpret_cast<bf16x8*>(lds + row * kRows + (chunk ^ (row % kChunks)) * 8);
    }
    static __device__ __forceinline__ bf16x8 in_order(bf16x8 stored, int row) {
        bf16x8 value;
#pragma unroll
        for (int e = 0; e < 8; e++) value[e] = row / 8 % 2 ? stored[e ^ 4] : stored[e];
        return value;
    }
    // LDS <-> global rows [row0, rows) x [column0, columns) of a matrix with `columns` columns, in row order.
    template <bool kVector>
    __device__ __forceinline__ void store(uint16_t* matrix, int row0, int column0, int rows, int columns) const {
#pragma unroll 4
        for (int i = threadIdx.x; i < kRows * kChunks; i += kProductThreads) {
            const int row = i / kChunks, column = i % kChunks * 8;
            const bf16x8 value = in_order(*chunk_at(row, i % kChunks), row);
            uint16_t* target = matrix + static_cast<int64_t>(row0 + row) * columns + column0 + column;
            if (row0 + row >= rows) continue;
            if (kVector) {
                if (column0 + column < columns) store16(target, value);
            } else {
                for (int e = 0; e < 8; e++)
                    if (column0 + column + e < columns) target[e] = value[e];
            }
        }
    }
    template <bool kVector>
    __device__ __forceinline__ void load(const uint16_t* matrix, int row0, int column0, int rows, int columns) const {
#pragma unroll 4
        for (int i = threadIdx.x; i < kRows * kChunks; i += kProductThreads) {
            const int row = i / kChunks, column = i % kChunks * 8;
            const int from = row0 + row < rows ? row0 + row : rows - 1;
            *chunk_at(row, i % kChunks) =
                in_order(load_chunk<kVector>(matrix + static_cast<int64_t>(from) * columns, column0 + column, columns), row);
        }
    }
};

// kSymmetric: C is symmetric, only tiles on and below the diagonal are computed; the mirror of a tile below it goes to C as well, and
// a tile on it is completed from its own lower half, so that C equals its transpose bit by bit whatever the operands are.
template <class Element, int kFrag, bool kSymmetric, bool kVector>
__device__ __forceinline__ void write_result(const ProductOperands& p, int row0, int column0, uint16_t* lds, const f32x16 (&acc)[kFrag][kFrag]) {
    const int lane = lane_id(), wave = wave_id();
    const int row = wave / 2 * 32 * kFrag + lane % 32, column = wave % 2 * 32 * kFrag + lane / 32 * 4;
    const bool on_diagonal = kSymmetric && row0 == column0;
    const ResultTile<kFrag> tile{lds};
    // No barrier before the first use of `lds`: no wave reads operands from it after the barrier of the last slab.
    if (p.d) {
        tile.template load<kVector>(p.d, row0, column0, p.m, p.n);
        block_sync_lds();
    }
    bf16x4 result[kFrag][kFrag][4];
#pragma unroll
    for (int i = 0; i < kFrag; i++)
#pragma unroll
        for (int j = 0; j < kFrag; j++)
#pragma unroll
            for (int q = 0; q < 4; q++) {
                const int r = row + 32 * i, c = column + 32 * j + 8 * q;
                bf16x4 addend;
                if (p.d) addend = *reinterpret_cast<const bf16x4*>(tile.at(r, c));
#pragma unroll
                for (int e = 0; e < 4; e++) {
                    float value = p.alpha * acc[i][j][4 * q + e];
                    if (p.d) value += p.beta * Element::to_float(static_cast<uint16_t>(addend[e]));
                    if (row0 + r == column0 + c + e) value += p.gamma;
                    result[i][j][q][e] = p.bf16_result ? float_to_bf16(value) : Element::from_float(value);
                }
            }
    if (on_diagonal && p.d) block_sync_lds();  // from here on, lanes write where others have read D
#pragma unroll
    for (int i = 0; i < kFrag; i++)
#pragma unroll
        for (int j = 0; j < kFrag; j++)
#pragma unroll
            for (int q = 0; q < 4; q++) {
                const int r = row + 32 * i, c = column + 32 * j + 8 * q;
                if (!on_diagonal) {
                    *reinterpret_cast<bf16x4*>(tile.at(r, c)) = result[i][j][q];
                } else {
#pragma unroll
                    for (int e = 0; e < 4; e++)
                        if (c + e <= r) *tile.at(r, c + e) = *tile.at(c + e, r) = result[i][j][q][e];
                }
            }
    block_sync_lds();
    tile.template store<kVector>(p.c, row0, column0, p.m, p.n);
    if (on_diagonal || !p.transposed) return;
    block_sync_lds();
#pragma unroll
    for (int i = 0; i < kFrag; i++)
#pragma unroll
        for (int j = 0; j < kFrag; j++)
#pragma unroll
            for (int q = 0; q < 4; q++)
#pragma unroll
                for (int e = 0; e < 4; e++) *tile.at(column + 32 * j + 8 * q + e, row + 32 * i) = result[i][j][q][e];
    block_sync_lds();
    tile.template store<kVector>(p.transposed, column0, row0, p.n, p.m);
}
