// SPDX-License-Identifier: Apache-2.0
// Stores accumulators: alpha, beta * D, gamma on the diagonal, one rounding, then the tile and its mirror image, both in 16-byte
// stores that are contiguous along their rows.
//
// The tile passes through LDS as rows of kSide elements, a tile of 256 in two halves. Chunk c of 16 bytes of row r sits at c ^ (r % chunks
// of a row), with its halves exchanged where r / 8 is odd: then the 16 rows that a phase of an 8-byte access reaches lie in different
// banks. A lane holds four consecutive columns of a row, so the tile itself is written 8 bytes at a time and its transpose 2 bytes at a
// time.
#pragma once
#include "product_tile.h"

template <int kSide>
struct ResultTile {
    static constexpr int kParts = kSide == 256 ? 2 : 1, kRows = kSide / kParts, kChunks = kSide / 8;
    uint16_t* lds;

    __device__ __forceinline__ uint16_t* at(int row, int column) const {
        return lds + row * kSide + ((column / 8) ^ (row % kChunks)) * 8 + (column % 8 ^ row / 8 % 2 * 4);
    }
    __device__ __forceinline__ bf16x8* chunk_at(int row, int chunk) const {
        return reinterpret_cast<bf16x8*>(lds + row * kSide + (chunk ^ (row % kChunks)) * 8);
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
        for (int i = threadIdx.x; i < kRows * kChunks; i += Tile<kSide>::kThreads) {
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
        for (int i = threadIdx.x; i < kRows * kChunks; i += Tile<kSide>::kThreads) {
            const int row = i / kChunks, column = i % kChunks * 8;
            const int from = row0 + row < rows ? row0 + row : rows - 1;
            *chunk_at(row, i % kChunks) =
                in_order(load_chunk<kVector>(matrix + static_cast<int64_t>(from) * columns, column0 + column, columns), row);
        }
    }
};

// kSymmetric: C is symmetric, only tiles on and below the diagonal are computed; the mirror of a tile below it goes to C as well, and
// a tile on it is completed from its own lower half, so that C equals its transpose bit by bit whatever the operands are.
template <class Element, int kSide, bool kSymmetric, bool kVector>
__device__ __forceinline__ void write_result(const ProductOperands& p, int row0, int column0, uint16_t* lds,
                                             const Accumulators<kSide>& acc) {
    using T = Tile<kSide>;
    using Result = ResultTile<kSide>;
    const int lane = lane_id(), wave_row = wave_id() / T::kColumnWaves, wave_column = wave_id() % T::kColumnWaves;
    const int row = wave_row * 32 * T::kRowFrags + lane % 32, column = wave_column * 32 * T::kColumnFrags + lane / 32 * 4;
    const bool on_diagonal = kSymmetric && row0 == column0;
    const Result tile{lds};
    // A tile of 256 passes in two parts: one row of waves holds the rows of a part, and half of the waves of a row hold its columns.
    auto has_rows = [&](int part) { return Result::kParts == 1 || wave_row == part; };
    auto has_columns = [&](int part) { return Result::kParts == 1 || wave_column / 2 == part; };
    bf16x4 result[T::kRowFrags][T::kColumnFrags][4] = {};  // at first D, or zeros
    // No barrier before the first use of `lds`: no wave reads operands from it after the barrier of the last slab.
#pragma unroll 1
    for (int part = 0; p.d && part < Result::kParts; part++) {
        if (part > 0) block_sync_lds();
        tile.template load<kVector>(p.d, row0 + part * Result::kRows, column0, p.m, p.n);
        block_sync_lds();
        if (!has_rows(part)) continue;
#pragma unroll
        for (int i = 0; i < T::kRowFrags; i++)
#pragma unroll
            for (int j = 0; j < T::kColumnFrags; j++)
#pragma unroll
                for (int q = 0; q < 4; q++)
                    result[i][j][q] =
                        *reinterpret_cast<const bf16x4*>(tile.at(row + 32 * i - part * Result::kRows, column + 32 * j + 8 * q));
    }
#pragma unroll
    for (int i = 0; i < T::kRowFrags; i++)
#pragma unroll
        for (int j = 0; j < T::kColumnFrags; j++)
#pragma unroll
            for (int q = 0; q < 4; q++)
#pragma unroll
                for (int e = 0; e < 4; e++) {
                    const int r = row + 32 * i, c = column + 32 * j + 8 * q + e;
                    float value = p.alpha * acc[i][j][4 * q + e];
                    if (p.d) value += p.beta * Element::to_float(static_cast<uint16_t>(result[i][j][q][e]));
                    if (row0 + r == column0 + c) value += p.gamma;
                    result[i][j][q][e] = p.bf16_result ? float_to_bf16(value) : Element::from_float(value);
                }
    if ((on_diagonal || Result::kParts > 1) && p.d) block_sync_lds();  // from here on, lanes write where others have read D
#pragma unroll 1
    for (int part = 0; part < Result::kParts; part++) {
        const int from = part * Result::kRows;
        int row_here = row, column_here = column;
        // else comparisons and addresses of all elements are computed ahead of the loop, and spill
        HO_OPAQUE(row_here);
        HO_OPAQUE(column_here);
        if (part > 0) block_sync_lds();
#pragma unroll
        for (int i = 0; i < T::kRowFrags; i++)
#pragma unroll
            for (int j = 0; j < T::kColumnFrags; j++)
#pragma unroll
                for (int q = 0; q < 4; q++) {
                    const int r = row_here + 32 * i, c = column_here + 32 * j + 8 * q;
                    if (!on_diagonal) {
                        if (has_rows(part)) *reinterpret_cast<bf16x4*>(tile.at(r - from, c)) = result[i][j][q];
                    } else {
#pragma unroll
                        for (int e = 0; e < 4; e++)
                            if (c + e <= r) {
                                if (has_rows(part)) *tile.at(r - from, c + e) = result[i][j][q][e];
                                if (has_columns(part)) *tile.at(c + e - from, r) = result[i][j][q][e];
                            }
                    }
                }
        block_sync_lds();
        tile.template store<kVector>(p.c, row0 + from, column0, p.m, p.n);
    }
    if (on_diagonal || !p.transposed) return;
#pragma unroll 1
    for (int part = 0; part < Result::kParts; part++) {
        const int from = part * Result::kRows;
        block_sync_lds();
        if (has_columns(part)) {
#pragma unroll
            for (int i = 0; i < T::kRowFrags; i++)
#pragma unroll
                for (int j = 0; j < T::kColumnFrags; j++)
#pragma unroll
                    for (int q = 0; q < 4; q++)
#pragma unroll
                        for (int e = 0; e < 4; e++) *tile.at(column + 32 * j + 8 * q + e - from, row + 32 * i) = result[i][j][q][e];
        }
        block_sync_lds();
        tile.template store<kVector>(p.transposed, column0 + from, row0, p.n, p.m);
    }
}
