// SPDX-License-Identifier: Apache-2.0
// The start of a Newton-Schulz iteration in one pass over X: start = X * factor, one factor a matrix, rounded once to the iteration's
// type, and its transpose, which the products read by rows too. A block has a tile of 64 x 64, which is transposed in LDS.
#include "product_epilogue.h"

struct Float32 {
    static __device__ __forceinline__ float to_float(float value) { return value; }
};
template <class Input>
struct Stored {
    using type = uint16_t;
};
template <>
struct Stored<Float32> {
    using type = float;
};

constexpr int kStartSide = 64, kStartThreads = Tile<kStartSide>::kThreads;

// Eight elements of a row; those at and beyond `left` are zero. kVector: all eight are inside or none.
template <class Input, bool kVector>
__device__ __forceinline__ void read_eight(const typename Stored<Input>::type* from, int left, float (&value)[8]) {
    constexpr int kWidth = 16 / static_cast<int>(sizeof(*from));
#pragma unroll
    for (int e = 0; e < 8; e++) value[e] = 0.0f;
    if (kVector) {
        if (left <= 0) return;
#pragma unroll
        for (int piece = 0; piece < 8; piece += kWidth) {
            const auto loaded = load16(from + piece);
#pragma unroll
            for (int e = 0; e < kWidth; e++) value[piece + e] = Input::to_float(loaded[e]);
        }
    } else {
#pragma unroll
        for (int e = 0; e < 8; e++)
            if (e < left) value[e] = Input::to_float(load_global(from + e));
    }
}

template <class Input, class Element, bool kVector>
__device__ __forceinline__ void start_block(const void* x, const float* factors, uint16_t* start, uint16_t* turned, int rows, int columns,
                                            uint16_t* lds) {
    using T = typename Stored<Input>::type;
    const int tile_columns = (columns + kStartSide - 1) / kStartSide, tiles = (rows + kStartSide - 1) / kStartSide * tile_columns;
    const int64_t matrix = static_cast<int>(blockIdx.x) / tiles, elements = static_cast<int64_t>(rows) * columns;
    const int tile = static_cast<int>(blockIdx.x) % tiles;
    const int row0 = tile / tile_columns * kStartSide, column0 = tile % tile_columns * kStartSide;
    const float factor = load_global(factors + matrix);
    const ResultTile<kStartSide> turned_tile{lds};
#pragma unroll
    for (int i = 0; i < kStartSide * kStartSide / 8 / kStartThreads; i++) {
        const int row = (static_cast<int>(threadIdx.x) + i * kStartThreads) / 8, column = static_cast<int>(threadIdx.x) % 8 * 8;
        const int left = row0 + row < rows ? columns - column0 - column : 0;
        const int64_t at = matrix * elements + static_cast<int64_t>(row0 + row) * columns + column0 + column;
        float value[8];
        read_eight<Input, kVector>(static_cast<const T*>(x) + at, left, value);
        bf16x8 rounded;
#pragma unroll
        for (int e = 0; e < 8; e++) {
#ifdef BUG_START_WITHOUT_FACTOR
            rounded[e] = Element::from_float(value[e]);
#else
            rounded[e] = Element::from_float(value[e] * factor);
#endif
#ifdef BUG_START_TRANSPOSED_IN_EIGHTS
            *turned_tile.at(column + e, row ^ (e & 1)) = rounded[e];
#else
            *turned_tile.at(column + e, row) = rounded[e];
#endif
        }
        if (kVector) {
            if (left > 0) store16(start + at, rounded);
        } else {
#pragma unroll
            for (int e = 0; e < 8; e++)
                if (e < left) store_global(start + at + e, static_cast<uint16_t>(rounded[e]));
        }
    }
#ifndef BUG_START_WITHOUT_BARRIER
    block_sync_lds();
#endif
    turned_tile.template store<kVector>(turned + matrix * elements, column0, row0, columns, rows);
}

#define START_KERNEL(name, Input, Element, kVector)                                                                               \
    HO_KERNEL(name, kStartThreads)(const void* x, const float* factors, uint16_t* start, uint16_t* turned, int rows, int columns) { \
        HO_LDS(uint16_t, lds, kStartSide * kStartSide);                                                                           \
        start_block<Input, Element, kVector>(x, factors, start, turned, rows, columns, lds);                                      \
    }

START_KERNEL(ho_start_bf16_to_bf16, Bfloat16, Bfloat16, true)
START_KERNEL(ho_start_bf16_to_fp16, Bfloat16, Float16, true)
START_KERNEL(ho_start_fp16_to_bf16, Float16, Bfloat16, true)
START_KERNEL(ho_start_fp16_to_fp16, Float16, Float16, true)
START_KERNEL(ho_start_fp32_to_bf16, Float32, Bfloat16, true)
START_KERNEL(ho_start_fp32_to_fp16, Float32, Float16, true)
START_KERNEL(ho_start_any_bf16_to_bf16, Bfloat16, Bfloat16, false)
START_KERNEL(ho_start_any_bf16_to_fp16, Bfloat16, Float16, false)
START_KERNEL(ho_start_any_fp16_to_bf16, Float16, Bfloat16, false)
START_KERNEL(ho_start_any_fp16_to_fp16, Float16, Float16, false)
START_KERNEL(ho_start_any_fp32_to_bf16, Float32, Bfloat16, false)
START_KERNEL(ho_start_any_fp32_to_fp16, Float32, Float16, false)

static bool start_aligned16(const void* pointer) { return reinterpret_cast<uintptr_t>(pointer) % 16 == 0; }

// x [batch, rows, columns], start alike and turned [batch, columns, rows], contiguous; factors [batch]. input: 0 bfloat16, 1 float16,
// 2 float32. half: 0 results in bfloat16, 1 in float16.
HO_EXPORT int ho_newton_schulz_start(const void* x, const void* factors, void* start, void* turned, int64_t batch, int64_t rows,
                                     int64_t columns, int64_t input, int64_t half, void* stream) {
    using Kernel = void (*)(const void*, const float*, uint16_t*, uint16_t*, int, int);
    static const Kernel kernels[2][3][2] = {
        {{ho_start_any_bf16_to_bf16, ho_start_any_bf16_to_fp16},
         {ho_start_any_fp16_to_bf16, ho_start_any_fp16_to_fp16},
         {ho_start_any_fp32_to_bf16, ho_start_any_fp32_to_fp16}},
        {{ho_start_bf16_to_bf16, ho_start_bf16_to_fp16},
         {ho_start_fp16_to_bf16, ho_start_fp16_to_fp16},
         {ho_start_fp32_to_bf16, ho_start_fp32_to_fp16}},
    };
    const int64_t tiles = (rows + kStartSide - 1) / kStartSide * ((columns + kStartSide - 1) / kStartSide);
    if (batch <= 0 || rows <= 0 || columns <= 0 || input < 0 || input > 2 || half < 0 || half > 1) return -1;
    if (rows > INT32_MAX / 2 || columns > INT32_MAX / 2 || batch * tiles > INT32_MAX) return -1;
    const bool vector = rows % 8 == 0 && columns % 8 == 0 && start_aligned16(x) && start_aligned16(start) && start_aligned16(turned);
    return ho_launch(kernels[vector][input][half], dim3(static_cast<unsigned>(batch * tiles)), dim3(kStartThreads), stream, x,
                     static_cast<const float*>(factors), static_cast<uint16_t*>(start), static_cast<uint16_t*>(turned),
                     static_cast<int>(rows), static_cast<int>(columns));
}
