// SPDX-License-Identifier: Apache-2.0
// One kernel source for three machines: AMD gfx942 and gfx950 (clang or hipcc), NVIDIA (nvcc) and the CPU (g++). Every .hip file includes this
// header and no other of the host: no torch, no std containers in kernels.
//
// Guarantees on every machine:
//   * a wave has kWave = 64 lanes. Do not use warpSize: it is no constant in HIP 7, and it is 32 on NVIDIA.
//   * blocks are one-dimensional and a multiple of kWave threads; threadIdx, blockIdx, blockDim, gridDim as usual.
//   * wave_* and mfma_* are collectives: all 64 lanes of the wave must reach the same call. The CPU aborts otherwise.
//   * lanes of one wave that exchange data through LDS need wave_sync() in between; lanes of different waves need block_sync_lds().
//   * every array in LDS is declared with HO_LDS, 16-byte aligned, and read or written in pieces aligned to their size.
//
// Differences: on NVIDIA a wave is two warps joined by a named barrier, and matrix products are emulated through shared memory, which
// verifies numbers and says nothing about speed. On the CPU a thread is a fiber (portable_cpu.h).
#pragma once

#include <stdint.h>

using bf16 = uint16_t;  // the bits of a bfloat16; convert with bf16_to_float and float_to_bf16

#if defined(__HIP__) || defined(__HIPCC__)
#define HO_HIP 1
#include "portable_hip.h"
#elif defined(__CUDACC__)
#define HO_CUDA 1
#include "portable_cuda.h"
#else
#define HO_CPU 1
#include "portable_cpu.h"
#endif

// Each of the three headers above defines
//
//   f32x4, f32x16, u32x4, bf16x4, bf16x8     vectors with operator[], aligned to their size
//   HO_LDS(type, name, count)                a 16-byte aligned array in LDS
//   HO_LDS_BIG(type, name, count)            the one array of a kernel whose LDS is above 48 KiB: launch it with ho_launch_lds
//   HO_KERNEL(name, threads)                 HO_KERNEL(ho_scale, 256)(float* x, int64_t n) { ... }: extern "C", launch bounds set
//   HO_EXPORT                                HO_EXPORT int ho_scale_run(void* x, int64_t n, void* stream) { ... }
//   ho_launch(kernel, grid, block, stream, arguments...)                  0 or the runtime's error; an empty grid launches nothing
//   ho_launch_lds(kernel, grid, block, lds_bytes, stream, arguments...)   the same for kernels with HO_LDS_BIG
//   lane_id(), wave_id()                     position in the wave, and of the wave in the block
//   block_sync()                             barrier of the block; LDS and global memory written before are visible after
//   block_sync_lds()                         barrier of the block that orders LDS alone: loads from global memory stay in flight
//   wave_sync()                              orders LDS between the lanes of one wave
//   wave_xor(v, mask)                        v of lane lane_id() ^ mask
//   mfma_32x32x8(a, b, c)                    c + a b, 32x8 times 8x32, one block; f32x16 a lane
//   mfma_16x16x16(a, b, c)                   c + a b, 16x16 times 16x16, one block; f32x4 a lane
//   mfma_32x32x16, mfma_16x16x32(a, b, c)    the same with twice the depth, a and b bf16x8. One instruction where kWideMfma, with the time of
//                                            the two above; elsewhere two of them, which add the terms in another order
//   load16, store16, load_nontemporal16, store_nontemporal16   16 bytes of global memory, aligned: 4 float, 4 uint32_t or 8 bf16
//   load_global, store_global                one element of global memory; on gfx942 they keep a pointer that was itself read from
//                                            memory (multi-tensor tables) from becoming a flat access
//
// CDNA3 lane layouts of the matrix products (v_mfma_f32_32x32x8_bf16 and v_mfma_f32_16x16x16_bf16; source: AMD's matrix instruction
// calculator, MI300 ISA guide section 7). M is 32 or 16, l the lane, e the element of the bf16x4, r the element of the accumulator:
//   a[e] = A[l % M][4 * (l / M) + e]                  b[e] = B[4 * (l / M) + e][l % M]
//   32x32: c[r] = C[8 * (r / 4) + 4 * (l / 32) + r % 4][l % 32]        16x16: c[r] = C[4 * (l / 16) + r][l % 16]
// The wide ones of CDNA4 (gfx950) have 8 in place of 4 in a and b: a[e] = A[l % M][8 * (l / M) + e]; c is the same.
// kWideMfma is true on gfx950; on NVIDIA and the CPU, which model either, with -DHO_WIDE_MFMA. mfma_row<M>(lane, r) and mfma_column<M>(lane) give these indices of C.

template <int M>
__device__ __forceinline__ constexpr int mfma_row(int lane, int r) {
  static_assert(M == 32 || M == 16, "");
  return M == 32 ? 8 * (r / 4) + 4 * (lane / 32) + r % 4 : 4 * (lane / 16) + r;
}

template <int M>
__device__ __forceinline__ constexpr int mfma_column(int lane) {
  return lane % M;
}

// The butterfly adds in the same order on every machine and leaves the same bits in all lanes.
__device__ __forceinline__ float wave_sum(float v) {
#pragma unroll
  for (int mask = kWave / 2; mask > 0; mask >>= 1) v += wave_xor(v, mask);
  return v;
}

template <class T>
__host__ __device__ __forceinline__ constexpr T min_of(T a, T b) {
  return a < b ? a : b;
}

template <class T>
__host__ __device__ __forceinline__ constexpr T max_of(T a, T b) {
  return a < b ? b : a;
}
