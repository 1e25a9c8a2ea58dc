// SPDX-License-Identifier: Apache-2.0
// portable.h for AMD: clang 17 or newer, or hipcc of ROCm 6 and 7. The device side uses compiler builtins only, so that the
// code object does not depend on the headers' version (Debian's 5.2, ROCm 7).
#pragma once

#include <hip/hip_runtime.h>

#ifndef HO_FENCE_OF_LDS
#define HO_FENCE_OF_LDS (__clang_major__ > 19 || (__clang_major__ == 19 && __clang_minor__ >= 1))
#endif

#if defined(__gfx950__)
#define HO_WIDE_MFMA 1
#endif

constexpr int kWave = 64;

using f32x4 = float __attribute__((ext_vector_type(4)));
using f32x16 = float __attribute__((ext_vector_type(16)));
using u32x4 = uint32_t __attribute__((ext_vector_type(4)));
using bf16x4 = bf16 __attribute__((ext_vector_type(4)));
using bf16x8 = bf16 __attribute__((ext_vector_type(8)));

#include "portable_bf16.h"
#include "portable_vector16.h"

#define HO_LDS(type, name, count) __shared__ __attribute__((aligned(16))) type name[count]
#define HO_LDS_BIG(type, name, count) HO_LDS(type, name, count)
#define HO_KERNEL(name, threads) extern "C" __global__ __launch_bounds__(threads) void name
#define HO_EXPORT extern "C" __attribute__((visibility("default")))

namespace ho {
template <class T>
struct Identity {
  using type = T;
};
template <class T>
using Global = __attribute__((address_space(1))) T;
}  // namespace ho

template <class... P>
inline int ho_launch(void (*kernel)(P...), dim3 grid, dim3 block, void* stream, typename ho::Identity<P>::type... arguments) {
  if (grid.x == 0 || grid.y == 0 || grid.z == 0) return 0;
  void* pointers[] = {static_cast<void*>(&arguments)...};
  return int(hipLaunchKernel(reinterpret_cast<const void*>(kernel), grid, block, pointers, 0, static_cast<hipStream_t>(stream)));
}

// LDS is a static array here, and gfx942 gives a block all of its 64 KiB (gfx950 has 160).
template <class... P>
inline int ho_launch_lds(void (*kernel)(P...), dim3 grid, dim3 block, size_t, void* stream, typename ho::Identity<P>::type... arguments) {
  return ho_launch(kernel, grid, block, stream, arguments...);
}

__device__ __forceinline__ int lane_id() { return int(threadIdx.x) & (kWave - 1); }

// All lanes have the same value; readfirstlane puts it, and results computed from it, into scalar registers.
__device__ __forceinline__ int wave_id() { return __builtin_amdgcn_readfirstlane(int(threadIdx.x) / kWave); }

__device__ __forceinline__ void block_sync() { __syncthreads(); }

__device__ __forceinline__ void block_sync_lds() {
  // Never s_waitcnt vmcnt(0). Compilers before clang 19.1 cannot limit a fence to LDS (ROCm 6's report themselves as 17 to 19.0); for
  // them the two instructions are written out.
#if HO_FENCE_OF_LDS
  __builtin_amdgcn_fence(__ATOMIC_RELEASE, "workgroup", "local");
  __builtin_amdgcn_s_barrier();
  __builtin_amdgcn_fence(__ATOMIC_ACQUIRE, "workgroup", "local");
#else
  asm volatile("s_waitcnt lgkmcnt(0)\n\ts_barrier" ::: "memory");
#endif
}

// LDS serves a wave's requests in order, so only the compiler must be kept from reordering them.
__device__ __forceinline__ void wave_sync() {
  __builtin_amdgcn_fence(__ATOMIC_ACQ_REL, "wavefront");
  __builtin_amdgcn_wave_barrier();
}

__device__ __forceinline__ float wave_xor(float v, int mask) {
  return __builtin_bit_cast(float, __builtin_amdgcn_ds_bpermute((lane_id() ^ mask) << 2, __builtin_bit_cast(int, v)));
}

namespace ho {
using s16x4 = short __attribute__((ext_vector_type(4)));
#if HO_WIDE_MFMA
using b16x8 = __bf16 __attribute__((ext_vector_type(8)));
#endif
}

__device__ __forceinline__ f32x16 mfma_32x32x8(bf16x4 a, bf16x4 b, f32x16 c) {
  return __builtin_amdgcn_mfma_f32_32x32x8bf16_1k(__builtin_bit_cast(ho::s16x4, a), __builtin_bit_cast(ho::s16x4, b), c, 0, 0, 0);
}

__device__ __forceinline__ f32x4 mfma_16x16x16(bf16x4 a, bf16x4 b, f32x4 c) {
  return __builtin_amdgcn_mfma_f32_16x16x16bf16_1k(__builtin_bit_cast(ho::s16x4, a), __builtin_bit_cast(ho::s16x4, b), c, 0, 0, 0);
}

__device__ __forceinline__ f32x16 mfma_32x32x16(bf16x8 a, bf16x8 b, f32x16 c) {
#if HO_WIDE_MFMA
  return __builtin_amdgcn_mfma_f32_32x32x16_bf16(__builtin_bit_cast(ho::b16x8, a), __builtin_bit_cast(ho::b16x8, b), c, 0, 0, 0);
#else
  return mfma_32x32x8(ho::half_of(a, 1), ho::half_of(b, 1), mfma_32x32x8(ho::half_of(a, 0), ho::half_of(b, 0), c));
#endif
}

__device__ __forceinline__ f32x4 mfma_16x16x32(bf16x8 a, bf16x8 b, f32x4 c) {
#if HO_WIDE_MFMA
  return __builtin_amdgcn_mfma_f32_16x16x32_bf16(__builtin_bit_cast(ho::b16x8, a), __builtin_bit_cast(ho::b16x8, b), c, 0, 0, 0);
#else
  return mfma_16x16x16(ho::half_of(a, 1), ho::half_of(b, 1), mfma_16x16x16(ho::half_of(a, 0), ho::half_of(b, 0), c));
#endif
}

template <class T>
__device__ __forceinline__ T load_global(const T* p) {
  return *(const ho::Global<T>*)(p);
}

template <class T>
__device__ __forceinline__ void store_global(T* p, typename ho::Identity<T>::type v) {
  *(ho::Global<T>*)(p) = v;
}

template <class T>
__device__ __forceinline__ ho::Vector16<T> load16(const T* p) {
  return *(const ho::Global<ho::Vector16<T>>*)(p);
}

template <class T>
__device__ __forceinline__ void store16(T* p, ho::Vector16<T> v) {
  *(ho::Global<ho::Vector16<T>>*)(p) = v;
}

template <class T>
__device__ __forceinline__ ho::Vector16<T> load_nontemporal16(const T* p) {
  return __builtin_nontemporal_load((const ho::Global<ho::Vector16<T>>*)(p));
}

template <class T>
__device__ __forceinline__ void store_nontemporal16(T* p, ho::Vector16<T> v) {
  __builtin_nontemporal_store(v, (ho::Global<ho::Vector16<T>>*)(p));
}
