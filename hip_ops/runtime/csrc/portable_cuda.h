// SPDX-License-Identifier: Apache-2.0
// portable.h for NVIDIA, to verify numbers on an available GPU. A wave of 64 lanes is two warps, which exchange data through shared memory
// between named barriers. There are 15 beside the block's own, hence at most 960 threads per block.
#pragma once

#include <cuda_runtime.h>

constexpr int kWave = 64;

namespace ho {
template <class T, int N>
struct alignas(sizeof(T) * N) Vector {
  T v[N];
  __host__ __device__ T& operator[](int i) { return v[i]; }
  __host__ __device__ const T& operator[](int i) const { return v[i]; }
};
template <class T>
struct Identity {
  using type = T;
};
}  // namespace ho

using f32x4 = ho::Vector<float, 4>;
using f32x16 = ho::Vector<float, 16>;
using u32x4 = ho::Vector<uint32_t, 4>;
using bf16x4 = ho::Vector<bf16, 4>;
using bf16x8 = ho::Vector<bf16, 8>;

#include "portable_bf16.h"
#include "portable_vector16.h"

#define HO_LDS(type, name, count) __shared__ __align__(16) type name[count]
// ptxas refuses static arrays above 48 KiB; dynamic ones may have 227 KiB.
#define HO_LDS_BIG(type, name, count)           \
  extern __shared__ __align__(16) unsigned char ho_lds_big[]; \
  type* const name = reinterpret_cast<type*>(ho_lds_big)
#define HO_KERNEL(name, threads) extern "C" __global__ __launch_bounds__(threads) void name
#define HO_EXPORT extern "C" __attribute__((visibility("default")))

template <class... P>
inline int ho_launch_lds(void (*kernel)(P...), dim3 grid, dim3 block, size_t lds_bytes, void* stream, typename ho::Identity<P>::type... arguments) {
  if (grid.x == 0 || grid.y == 0 || grid.z == 0) return 0;
  const void* function = reinterpret_cast<const void*>(kernel);
  if (lds_bytes > 0) {  // with the static part it may exceed 48 KiB, which a launch refuses by default
    const int code = int(cudaFuncSetAttribute(function, cudaFuncAttributeMaxDynamicSharedMemorySize, int(lds_bytes)));
    if (code != 0) return code;
  }
  void* pointers[] = {static_cast<void*>(&arguments)...};
  return int(cudaLaunchKernel(function, grid, block, pointers, lds_bytes, static_cast<cudaStream_t>(stream)));
}

template <class... P>
inline int ho_launch(void (*kernel)(P...), dim3 grid, dim3 block, void* stream, typename ho::Identity<P>::type... arguments) {
  return ho_launch_lds(kernel, grid, block, 0, stream, arguments...);
}

__device__ __forceinline__ int lane_id() { return int(threadIdx.x) & (kWave - 1); }
__device__ __forceinline__ int wave_id() { return int(threadIdx.x) / kWave; }
__device__ __forceinline__ void block_sync() { __syncthreads(); }
__device__ __forceinline__ void block_sync_lds() { __syncthreads(); }
__device__ __forceinline__ void wave_sync() { asm volatile("bar.sync %0, 64;" ::"r"(1 + wave_id()) : "memory"); }

__device__ __forceinline__ float wave_xor(float v, int mask) {
  if (mask < 32) return __shfl_xor_sync(0xffffffffu, v, mask);
  __shared__ float exchange[960];
  exchange[threadIdx.x] = v;
  wave_sync();
  const float other = exchange[threadIdx.x ^ mask];
  wave_sync();  // the next exchange overwrites data that the other warp may still read
  return other;
}

namespace ho {
// Not inlined: it is some 400 instructions, and a tile of a matrix product calls it dozens of times.
template <int M, class Operand, class Accumulator>
__device__ __noinline__ Accumulator mfma(Operand a, Operand b, Accumulator c) {
  constexpr int kMaxWaves = 8;  // 8 KiB of shared memory: blocks with matrix products have at most 512 threads
  __shared__ Operand exchange_a[kMaxWaves][kWave];
  __shared__ Operand exchange_b[kMaxWaves][kWave];
  const int lane = lane_id(), wave = wave_id();
  if (wave >= kMaxWaves) __trap();
  exchange_a[wave][lane] = a;
  exchange_b[wave][lane] = b;
  wave_sync();
#pragma unroll
  for (int r = 0; r < M * M / kWave; ++r) {
    const int row = M == 32 ? 8 * (r / 4) + 4 * (lane / 32) + r % 4 : 4 * (lane / 16) + r;
    float sum = c[r];
#pragma unroll
    for (int slot = 0; slot < kWave / M; ++slot) {
      const Operand x = exchange_a[wave][slot * M + row], y = exchange_b[wave][slot * M + lane % M];
#pragma unroll
      for (int e = 0; e < int(sizeof(Operand) / 2); ++e) sum += bf16_to_float(x[e]) * bf16_to_float(y[e]);
    }
    c[r] = sum;
  }
  wave_sync();
  return c;
}
}  // namespace ho

__device__ __forceinline__ f32x16 mfma_32x32x8(bf16x4 a, bf16x4 b, f32x16 c) { return ho::mfma<32>(a, b, c); }
__device__ __forceinline__ f32x4 mfma_16x16x16(bf16x4 a, bf16x4 b, f32x4 c) { return ho::mfma<16>(a, b, c); }
#if HO_WIDE_MFMA
__device__ __forceinline__ f32x16 mfma_32x32x16(bf16x8 a, bf16x8 b, f32x16 c) { return ho::mfma<32>(a, b, c); }
__device__ __forceinline__ f32x4 mfma_16x16x32(bf16x8 a, bf16x8 b, f32x4 c) { return ho::mfma<16>(a, b, c); }
#else
__device__ __forceinline__ f32x16 mfma_32x32x16(bf16x8 a, bf16x8 b, f32x16 c) {
  return mfma_32x32x8(ho::half_of(a, 1), ho::half_of(b, 1), mfma_32x32x8(ho::half_of(a, 0), ho::half_of(b, 0), c));
}
__device__ __forceinline__ f32x4 mfma_16x16x32(bf16x8 a, bf16x8 b, f32x4 c) {
  return mfma_16x16x16(ho::half_of(a, 1), ho::half_of(b, 1), mfma_16x16x16(ho::half_of(a, 0), ho::half_of(b, 0), c));
}
#endif

template <class T>
__device__ __forceinline__ T load_global(const T* p) {
  return *p;
}

template <class T>
__device__ __forceinline__ void store_global(T* p, typename ho::Identity<T>::type v) {
  *p = v;
}

template <class T>
__device__ __forceinline__ ho::Vector16<T> load16(const T* p) {
  return *reinterpret_cast<const ho::Vector16<T>*>(p);
}

template <class T>
__device__ __forceinline__ void store16(T* p, ho::Vector16<T> v) {
  *reinterpret_cast<ho::Vector16<T>*>(p) = v;
}

template <class T>
__device__ __forceinline__ ho::Vector16<T> load_nontemporal16(const T* p) {
  const uint4 bits = __ldcs(reinterpret_cast<const uint4*>(p));
  return *reinterpret_cast<const ho::Vector16<T>*>(&bits);
}

template <class T>
__device__ __forceinline__ void store_nontemporal16(T* p, ho::Vector16<T> v) {
  __stcs(reinterpret_cast<uint4*>(p), *reinterpret_cast<const uint4*>(&v));
}
