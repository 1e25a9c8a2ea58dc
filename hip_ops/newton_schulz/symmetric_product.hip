// SPDX-License-Identifier: Apache-2.0
// Batched products of Newton-Schulz iterations, bf16 and fp16:
//   symmetric:  C = alpha * A * B^T + beta * D + gamma * I, A and B [batch, n, k], C and D symmetric [batch, n, n].
//               B = A for a Gram matrix; B != A where the caller knows that A * B^T is symmetric (commuting symmetric factors).
//   general:    C = alpha * A * B^T + beta * D, A [batch, m, k], B [batch, n, k], C and D [batch, m, n], with the transpose of C
//               written in the same pass on request: the next Newton-Schulz step reads both X and its transpose by rows.
#include "product_epilogue.h"

template <class Element, int kFrag, bool kSymmetric, bool kVector>
__device__ __forceinline__ void product_block(ProductOperands p) {
    constexpr int kRows = 64 * kFrag;
    HO_LDS(uint16_t, lds, 4 * kRows * kSlab);  // two stages of two operands; the result tile needs no more
    static_assert(kRows * kRows <= 4 * kRows * kSlab, "the result tile passes through the stages' LDS");
    const int tile_rows = (p.m + kRows - 1) / kRows, tile_columns = (p.n + kRows - 1) / kRows;
    const int tiles = kSymmetric ? tile_rows * (tile_rows + 1) / 2 : tile_rows * tile_columns;
    const int position = xcd_contiguous(static_cast<int>(blockIdx.x), static_cast<int>(gridDim.x));
    const int64_t matrix = position / tiles;
    const TileIndex tile = kSymmetric ? lower_triangle_tile(position % tiles, tile_rows)
                                      : full_grid_tile(position % tiles, tile_rows, tile_columns);
    const int row0 = tile.row * kRows, column0 = tile.column * kRows;
    const uint16_t* a = p.a + (matrix * p.m + row0) * p.k;
    const uint16_t* b = p.b + (matrix * p.n + column0) * p.k;
    const int64_t output = matrix * p.m * p.n;
    p.c += output;
    if (p.d) p.d += output;
    if (p.transposed) p.transposed += output;
    f32x16 acc[kFrag][kFrag];
#pragma unroll
    for (int i = 0; i < kFrag; i++)
#pragma unroll
        for (int j = 0; j < kFrag; j++)
#pragma unroll
            for (int e = 0; e < 16; e++) acc[i][j][e] = 0.0f;
    accumulate<Element, kFrag, kVector>(p, a, b, p.m - row0, p.n - column0, lds, acc);
    write_result<Element, kFrag, kSymmetric, kVector>(p, row0, column0, lds, acc);
}

#define SYMMETRIC_KERNEL(name, Element, kFrag, kVector)                                                                          \
    HO_KERNEL(name, kProductThreads)(const uint16_t* a, const uint16_t* b, const uint16_t* d, uint16_t* c, int n, int k,          \
                                     float alpha, float beta, float gamma) {                                                     \
        product_block<Element, kFrag, true, kVector>(ProductOperands{a, b, d, c, c, n, n, k, alpha, beta, gamma, false});        \
    }
#define GENERAL_KERNEL(name, Element, kFrag, kVector)                                                                            \
    HO_KERNEL(name, kProductThreads)(const uint16_t* a, const uint16_t* b, const uint16_t* d, uint16_t* c, uint16_t* transposed,  \
                                     int m, int n, int k, float alpha, float beta, int to_bf16) {                                \
        product_block<Element, kFrag, false, kVector>(ProductOperands{a, b, d, c, transposed, m, n, k, alpha, beta, 0.0f, to_bf16 != 0});\
    }

// vector: every row starts on 16 bytes (all of m, n, k multiples of 8); any: everything else.
SYMMETRIC_KERNEL(ho_symmetric_bf16_128, Bfloat16, 2, true)
SYMMETRIC_KERNEL(ho_symmetric_bf16_64, Bfloat16, 1, true)
SYMMETRIC_KERNEL(ho_symmetric_bf16_any, Bfloat16, 1, false)
SYMMETRIC_KERNEL(ho_symmetric_fp16_128, Float16, 2, true)
SYMMETRIC_KERNEL(ho_symmetric_fp16_64, Float16, 1, true)
SYMMETRIC_KERNEL(ho_symmetric_fp16_any, Float16, 1, false)
GENERAL_KERNEL(ho_general_bf16_128, Bfloat16, 2, true)
GENERAL_KERNEL(ho_general_bf16_64, Bfloat16, 1, true)
GENERAL_KERNEL(ho_general_bf16_any, Bfloat16, 1, false)
GENERAL_KERNEL(ho_general_fp16_128, Float16, 2, true)
GENERAL_KERNEL(ho_general_fp16_64, Float16, 1, true)
GENERAL_KERNEL(ho_general_fp16_any, Float16, 1, false)

// Choice of the tile: 128 has twice the arithmetic per byte of LDS traffic, but its blocks must fill the device's 304 CUs, two per
// CU; with fewer, four times as many blocks of 64 finish sooner. Rows: {fewest 128-tiles, tile}, first match counts.
struct TileChoice {
    int64_t fewest_large_tiles;
    int tile;
};
constexpr TileChoice kTileTable[] = {{304, 128}, {0, 64}};

static int choose_tile(int64_t large_tiles) {
    for (const TileChoice& choice : kTileTable)
        if (large_tiles >= choice.fewest_large_tiles) return choice.tile;
    return 64;
}

static bool aligned16(const void* pointer) { return reinterpret_cast<uintptr_t>(pointer) % 16 == 0; }
static int64_t tiles_of(int64_t rows, int tile) { return (rows + tile - 1) / tile; }

#define HO_LAUNCH_PRODUCT(family, ...)                                                                                            \
    if (half)                                                                                                                    \
        return !vector       ? ho_launch(family##_fp16_any, grid, dim3(kProductThreads), stream, __VA_ARGS__)                     \
               : tile == 128 ? ho_launch(family##_fp16_128, grid, dim3(kProductThreads), stream, __VA_ARGS__)                     \
                             : ho_launch(family##_fp16_64, grid, dim3(kProductThreads), stream, __VA_ARGS__);                     \
    return !vector       ? ho_launch(family##_bf16_any, grid, dim3(kProductThreads), stream, __VA_ARGS__)                         \
           : tile == 128 ? ho_launch(family##_bf16_128, grid, dim3(kProductThreads), stream, __VA_ARGS__)                         \
                         : ho_launch(family##_bf16_64, grid, dim3(kProductThreads), stream, __VA_ARGS__);

// half: 0 bfloat16, 1 float16. tile: 0 (by table), 64 or 128. All matrices contiguous; d may be null.
HO_EXPORT int ho_symmetric_product(const void* a, const void* b, const void* d, void* c, int64_t batch, int64_t n, int64_t k,
                                   float alpha, float beta, float gamma, int64_t half, int64_t tile, void* stream) {
    if (batch <= 0 || n <= 0 || k <= 0 || (tile != 0 && tile != 64 && tile != 128)) return -1;
    const bool vector = n % 8 == 0 && k % 8 == 0 && aligned16(a) && aligned16(b) && aligned16(c) && aligned16(d);
    const int64_t large = tiles_of(n, 128);
    if (tile == 0) tile = choose_tile(batch * large * (large + 1) / 2);
    if (!vector) tile = 64;
    const int64_t rows = tiles_of(n, static_cast<int>(tile)), blocks = batch * rows * (rows + 1) / 2;
    if (blocks > INT32_MAX || n > INT32_MAX / 2 || n * k > UINT32_MAX) return -1;
    const dim3 grid(static_cast<unsigned>(blocks));
    HO_LAUNCH_PRODUCT(ho_symmetric, static_cast<const uint16_t*>(a), static_cast<const uint16_t*>(b), static_cast<const uint16_t*>(d),
                      static_cast<uint16_t*>(c), static_cast<int>(n), static_cast<int>(k), alpha, beta, gamma)
}

// b is [batch, n, k]: the transpose of the right factor. transposed, [batch, n, m], may be null. bf16_result: C of half operands is bfloat16.
HO_EXPORT int ho_general_product(const void* a, const void* b, const void* d, void* c, void* transposed, int64_t batch, int64_t m,
                                 int64_t n, int64_t k, float alpha, float beta, int64_t half, int64_t bf16_result, int64_t tile, void* stream) {
    if (batch <= 0 || m <= 0 || n <= 0 || k <= 0 || (tile != 0 && tile != 64 && tile != 128)) return -1;
    const bool vector = m % 8 == 0 && n % 8 == 0 && k % 8 == 0 && aligned16(a) && aligned16(b) && aligned16(c) && aligned16(d) &&
                        aligned16(transposed);
    if (tile == 0) tile = choose_tile(batch * tiles_of(m, 128) * tiles_of(n, 128));
    if (!vector) tile = 64;
    const int64_t blocks = batch * tiles_of(m, static_cast<int>(tile)) * tiles_of(n, static_cast<int>(tile));
    if (blocks > INT32_MAX || m > INT32_MAX / 2 || n > INT32_MAX / 2 || (m > n ? m : n) * k > UINT32_MAX) return -1;
    const dim3 grid(static_cast<unsigned>(blocks));
    HO_LAUNCH_PRODUCT(ho_general, static_cast<const uint16_t*>(a), static_cast<const uint16_t*>(b), static_cast<const uint16_t*>(d),
                      static_cast<uint16_t*>(c), static_cast<uint16_t*>(transposed), static_cast<int>(m), static_cast<int>(n),
                      static_cast<int>(k), alpha, beta, static_cast<int>(bf16_result))
}
