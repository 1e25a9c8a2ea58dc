// SPDX-License-Identifier: Apache-2.0
// Batched products of Newton-Schulz iterations, bf16 and fp16:
//   symmetric:  C = alpha * A * B^T + beta * D + gamma * I, A and B [batch, n, k], C and D symmetric [batch, n, n].
//               B = A for a Gram matrix; B != A where the caller knows that A * B^T is symmetric (commuting symmetric factors).
//   general:    C = alpha * A * B^T + beta * D, A [batch, m, k], B [batch, n, k], C and D [batch, m, n], with the transpose of C
//               written in the same pass on request: the next Newton-Schulz step reads both X and its transpose by rows.
#include "product_epilogue.h"

template <class Element, int kSide, bool kSymmetric, bool kVector>
__device__ __forceinline__ void product_block(ProductOperands p, uint16_t* lds) {
    const int tile_rows = (p.m + kSide - 1) / kSide, tile_columns = (p.n + kSide - 1) / kSide;
    const int tiles = kSymmetric ? tile_rows * (tile_rows + 1) / 2 : tile_rows * tile_columns;
    const int position = xcd_contiguous(static_cast<int>(blockIdx.x), static_cast<int>(gridDim.x));
    const int64_t matrix = position / tiles;
    const TileIndex tile = kSymmetric ? lower_triangle_tile(position % tiles, tile_rows)
                                      : full_grid_tile(position % tiles, tile_rows, tile_columns);
    const int row0 = tile.row * kSide, column0 = tile.column * kSide;
    const uint16_t* a = p.a + (matrix * p.m + row0) * p.k;
    const uint16_t* b = p.b + (matrix * p.n + column0) * p.k;
    const int64_t output = matrix * p.m * p.n;
    p.c += output;
    if (p.d) p.d += output;
    if (p.transposed) p.transposed += output;
    Accumulators<kSide> acc;
#pragma unroll
    for (int i = 0; i < Tile<kSide>::kRowFrags; i++)
#pragma unroll
        for (int j = 0; j < Tile<kSide>::kColumnFrags; j++)
#pragma unroll
            for (int e = 0; e < 16; e++) acc[i][j][e] = 0.0f;
    accumulate<Element, kSide, kVector>(p, a, b, p.m - row0, p.n - column0, lds, acc);
    write_result<Element, kSide, kSymmetric, kVector>(p, row0, column0, lds, acc);
}

#define SYMMETRIC_KERNEL(name, Element, kSide, kVector)                                                                          \
    HO_KERNEL(name, Tile<kSide>::kThreads)(const uint16_t* a, const uint16_t* b, const uint16_t* d, uint16_t* c, int n, int k,    \
                                           float alpha, float beta, float gamma) {                                               \
        HO_LDS_BIG(uint16_t, lds, Tile<kSide>::kLds);                                                                            \
        product_block<Element, kSide, true, kVector>(ProductOperands{a, b, d, c, c, n, n, k, alpha, beta, gamma, false}, lds);   \
    }
#define GENERAL_KERNEL(name, Element, kSide, kVector)                                                                            \
    HO_KERNEL(name, Tile<kSide>::kThreads)(const uint16_t* a, const uint16_t* b, const uint16_t* d, uint16_t* c,                  \
                                           uint16_t* transposed, int m, int n, int k, float alpha, float beta, int to_bf16) {    \
        HO_LDS_BIG(uint16_t, lds, Tile<kSide>::kLds);                                                                            \
        product_block<Element, kSide, false, kVector>(                                                                           \
            ProductOperands{a, b, d, c, transposed, m, n, k, alpha, beta, 0.0f, to_bf16 != 0}, lds);                             \
    }

// vector: every row starts on 16 bytes (all of m, n, k multiples of 8); any: everything else.
SYMMETRIC_KERNEL(ho_symmetric_bf16_256, Bfloat16, 256, true)
SYMMETRIC_KERNEL(ho_symmetric_bf16_128, Bfloat16, 128, true)
SYMMETRIC_KERNEL(ho_symmetric_bf16_64, Bfloat16, 64, true)
SYMMETRIC_KERNEL(ho_symmetric_bf16_any, Bfloat16, 64, false)
SYMMETRIC_KERNEL(ho_symmetric_fp16_256, Float16, 256, true)
SYMMETRIC_KERNEL(ho_symmetric_fp16_128, Float16, 128, true)
SYMMETRIC_KERNEL(ho_symmetric_fp16_64, Float16, 64, true)
SYMMETRIC_KERNEL(ho_symmetric_fp16_any, Float16, 64, false)
GENERAL_KERNEL(ho_general_bf16_256, Bfloat16, 256, true)
GENERAL_KERNEL(ho_general_bf16_128, Bfloat16, 128, true)
GENERAL_KERNEL(ho_general_bf16_64, Bfloat16, 64, true)
GENERAL_KERNEL(ho_general_bf16_any, Bfloat16, 64, false)
GENERAL_KERNEL(ho_general_fp16_256, Float16, 256, true)
GENERAL_KERNEL(ho_general_fp16_128, Float16, 128, true)
GENERAL_KERNEL(ho_general_fp16_64, Float16, 64, true)
GENERAL_KERNEL(ho_general_fp16_any, Float16, 64, false)

static bool aligned16(const void* pointer) { return reinterpret_cast<uintptr_t>(pointer) % 16 == 0; }
static int64_t tiles_of(int64_t rows, int tile) { return (rows + tile - 1) / tile; }

#define HO_LAUNCH_TILE(kernel, kSide, ...) \
    ho_launch_lds(kernel, grid, dim3(Tile<kSide>::kThreads), Tile<kSide>::kLds * sizeof(uint16_t), stream, __VA_ARGS__)
#define HO_LAUNCH_PRODUCT(family, ...)                                                    \
    if (half)                                                                             \
        return !vector       ? HO_LAUNCH_TILE(family##_fp16_any, 64, __VA_ARGS__)         \
               : tile == 256 ? HO_LAUNCH_TILE(family##_fp16_256, 256, __VA_ARGS__)        \
               : tile == 128 ? HO_LAUNCH_TILE(family##_fp16_128, 128, __VA_ARGS__)        \
                             : HO_LAUNCH_TILE(family##_fp16_64, 64, __VA_ARGS__);         \
    return !vector       ? HO_LAUNCH_TILE(family##_bf16_any, 64, __VA_ARGS__)             \
           : tile == 256 ? HO_LAUNCH_TILE(family##_bf16_256, 256, __VA_ARGS__)            \
           : tile == 128 ? HO_LAUNCH_TILE(family##_bf16_128, 128, __VA_ARGS__)            \
                         : HO_LAUNCH_TILE(family##_bf16_64, 64, __VA_ARGS__);

static bool no_such_tile(int64_t tile) { return tile != 64 && tile != 128 && tile != 256; }

// half: 0 bfloat16, 1 float16. tile: side of the tiles, 64, 128 or 256; ignored where rows do not start on 16 bytes. All matrices
// contiguous; d may be null.
HO_EXPORT int ho_symmetric_product(const void* a, const void* b, const void* d, void* c, int64_t batch, int64_t n, int64_t k,
                                   float alpha, float beta, float gamma, int64_t half, int64_t tile, void* stream) {
    if (batch <= 0 || n <= 0 || k <= 0 || no_such_tile(tile)) return -1;
    const bool vector = n % 8 == 0 && k % 8 == 0 && aligned16(a) && aligned16(b) && aligned16(c) && aligned16(d);
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
    if (batch <= 0 || m <= 0 || n <= 0 || k <= 0 || no_such_tile(tile)) return -1;
    const bool vector = m % 8 == 0 && n % 8 == 0 && k % 8 == 0 && aligned16(a) && aligned16(b) && aligned16(c) && aligned16(d) &&
                        aligned16(transposed);
    if (!vector) tile = 64;
    const int64_t blocks = batch * tiles_of(m, static_cast<int>(tile)) * tiles_of(n, static_cast<int>(tile));
    if (blocks > INT32_MAX || m > INT32_MAX / 2 || n > INT32_MAX / 2 || (m > n ? m : n) * k > UINT32_MAX) return -1;
    const dim3 grid(static_cast<unsigned>(blocks));
    HO_LAUNCH_PRODUCT(ho_general, static_cast<const uint16_t*>(a), static_cast<const uint16_t*>(b), static_cast<const uint16_t*>(d),
                      static_cast<uint16_t*>(c), static_cast<uint16_t*>(transposed), static_cast<int>(m), static_cast<int>(n),
                      static_cast<int>(k), alpha, beta, static_cast<int>(bf16_result))
}
