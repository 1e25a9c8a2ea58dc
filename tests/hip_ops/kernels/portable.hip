// SPDX-License-Identifier: Apache-2.0
// One small kernel for each promise of portable.h; tests/hip_ops/test_portable.py and tests/gpu/test_hip_ops_platform.py run them.
#include "portable.h"

constexpr int kThreads = 256;

// out[t] = in[t ^ mask] within the wave; sums[t] = sum of the wave's 64 values.
HO_KERNEL(ho_test_waves, 256)(const float* in, float* out, float* sums, int mask) {
  const int64_t i = int64_t(blockIdx.x) * kThreads + threadIdx.x;
  out[i] = wave_xor(in[i], mask);
  sums[i] = wave_sum(in[i]);
}

HO_EXPORT int ho_test_waves_run(const void* in, void* out, void* sums, int64_t blocks, int64_t mask, void* stream) {
  return ho_launch(ho_test_waves, dim3(unsigned(blocks)), dim3(kThreads), stream, static_cast<const float*>(in), static_cast<float*>(out),
                   static_cast<float*>(sums), int(mask));
}

// Where a thread says it is: block, thread, lane, wave.
HO_KERNEL(ho_test_places, 256)(int32_t* out) {
  const int64_t i = (int64_t(blockIdx.y) * gridDim.x + blockIdx.x) * blockDim.x + threadIdx.x;
  out[4 * i] = int32_t(blockIdx.y * 1000 + blockIdx.x), out[4 * i + 1] = int32_t(threadIdx.x);
  out[4 * i + 2] = lane_id(), out[4 * i + 3] = wave_id();
}

HO_EXPORT int ho_test_places_run(void* out, int64_t x, int64_t y, int64_t threads, void* stream) {
  return ho_launch(ho_test_places, dim3(unsigned(x), unsigned(y)), dim3(unsigned(threads)), stream, static_cast<int32_t*>(out));
}

// Reverses each block's 1024 floats through LDS; the barrier is of either kind.
template <bool kLdsOnly>
__device__ __forceinline__ void reverse(const float* in, float* out) {
  HO_LDS(float, tile, 4 * kThreads);
  const int64_t start = int64_t(blockIdx.x) * 4 * kThreads;
  const int t = int(threadIdx.x);
  *reinterpret_cast<f32x4*>(&tile[4 * t]) = load16(in + start + 4 * t);
#ifndef BUG_NO_BARRIER
  if (kLdsOnly) block_sync_lds();
  else block_sync();
#endif
  const f32x4 v = *reinterpret_cast<const f32x4*>(&tile[4 * (kThreads - 1 - t)]);
  f32x4 turned;
#pragma unroll
  for (int e = 0; e < 4; ++e) turned[e] = v[3 - e];
  store16(out + start + 4 * t, turned);
}

HO_KERNEL(ho_test_reverse, 256)(const float* in, float* out) { reverse<false>(in, out); }
HO_KERNEL(ho_test_reverse_lds, 256)(const float* in, float* out) { reverse<true>(in, out); }

HO_EXPORT int ho_test_reverse_run(const void* in, void* out, int64_t blocks, int64_t lds_only, void* stream) {
  return ho_launch(lds_only ? ho_test_reverse_lds : ho_test_reverse, dim3(unsigned(blocks)), dim3(kThreads), stream,
                   static_cast<const float*>(in), static_cast<float*>(out));
}

// The same within each wave, behind wave_sync().
HO_KERNEL(ho_test_reverse_wave, 256)(const float* in, float* out) {
  HO_LDS(float, tile, kThreads);
  const int64_t i = int64_t(blockIdx.x) * kThreads + threadIdx.x;
  tile[threadIdx.x] = in[i];
  wave_sync();
  out[i] = tile[threadIdx.x ^ (kWave - 1)];
}

HO_EXPORT int ho_test_reverse_wave_run(const void* in, void* out, int64_t blocks, void* stream) {
  return ho_launch(ho_test_reverse_wave, dim3(unsigned(blocks)), dim3(kThreads), stream, static_cast<const float*>(in), static_cast<float*>(out));
}

// 56 KiB of LDS: more than a static array may have on NVIDIA.
constexpr int kBig = 14 * 1024;
HO_KERNEL(ho_test_big_lds, 256)(const float* in, float* out) {
  HO_LDS_BIG(float, tile, kBig);
  for (int i = int(threadIdx.x); i < kBig; i += kThreads) tile[i] = in[i];
  block_sync();
  for (int i = int(threadIdx.x); i < kBig; i += kThreads) out[i] = tile[kBig - 1 - i];
}

HO_EXPORT int ho_test_big_lds_run(const void* in, void* out, void* stream) {
  return ho_launch_lds(ho_test_big_lds, dim3(1), dim3(kThreads), kBig * sizeof(float), stream, static_cast<const float*>(in), static_cast<float*>(out));
}

// C = A B from row-major bf16 A [M, K], B [K, M] by one wave; element e of lane l as portable.h says. K = 256 / M, twice that with bf16x8.
template <int M, class Operand, class Accumulator>
__device__ __forceinline__ void product(const bf16* a, const bf16* b, float* c) {
  constexpr int kElements = sizeof(Operand) / 2, K = kElements * kWave / M;
  const int lane = lane_id();
  Operand x, y;
  Accumulator sum;
#pragma unroll
  for (int e = 0; e < kElements; ++e) {
    const int k = kElements * (lane / M) + e;
    x[e] = a[(lane % M) * K + k], y[e] = b[k * M + lane % M];
  }
#pragma unroll
  for (int r = 0; r < M * M / kWave; ++r) sum[r] = c[mfma_row<M>(lane, r) * M + mfma_column<M>(lane)];
  if constexpr (M == 32 && kElements == 8) sum = mfma_32x32x16(x, y, sum);
  else if constexpr (kElements == 8) sum = mfma_16x16x32(x, y, sum);
  else if constexpr (M == 32) sum = mfma_32x32x8(x, y, sum);
  else sum = mfma_16x16x16(x, y, sum);
#pragma unroll
  for (int r = 0; r < M * M / kWave; ++r) c[mfma_row<M>(lane, r) * M + mfma_column<M>(lane)] = sum[r];
}

HO_KERNEL(ho_test_mfma_32, 64)(const bf16* a, const bf16* b, float* c) { product<32, bf16x4, f32x16>(a, b, c); }
HO_KERNEL(ho_test_mfma_16, 64)(const bf16* a, const bf16* b, float* c) { product<16, bf16x4, f32x4>(a, b, c); }
HO_KERNEL(ho_test_mfma_32_wide, 64)(const bf16* a, const bf16* b, float* c) { product<32, bf16x8, f32x16>(a, b, c); }
HO_KERNEL(ho_test_mfma_16_wide, 64)(const bf16* a, const bf16* b, float* c) { product<16, bf16x8, f32x4>(a, b, c); }

HO_EXPORT int ho_test_mfma_run(const void* a, const void* b, void* c, int64_t m, int64_t wide, void* stream) {
  if (m != 32 && m != 16) return -1;
  auto* const narrow_kernel = m == 32 ? ho_test_mfma_32 : ho_test_mfma_16;
  return ho_launch(wide ? m == 32 ? ho_test_mfma_32_wide : ho_test_mfma_16_wide : narrow_kernel, dim3(1), dim3(kWave), stream, static_cast<const bf16*>(a), static_cast<const bf16*>(b),
                   static_cast<float*>(c));
}

// bf16 there and back, 8 elements a thread, through the streaming accesses.
HO_KERNEL(ho_test_bf16, 256)(const float* in, bf16* out, float* back, int64_t n) {
  const int64_t i = 8 * (int64_t(blockIdx.x) * kThreads + threadIdx.x);
  if (i >= n) return;
  const f32x4 low = load_nontemporal16(in + i), high = load_nontemporal16(in + i + 4);
  bf16x8 packed;
#pragma unroll
  for (int e = 0; e < 8; ++e) packed[e] = float_to_bf16(e < 4 ? low[e] : high[e - 4]);
  store_nontemporal16(out + i, packed);
#pragma unroll
  for (int e = 0; e < 8; ++e) store_global(back + i + e, bf16_to_float(packed[e]));
}

HO_EXPORT int ho_test_bf16_run(const void* in, void* out, void* back, int64_t n, void* stream) {
  return ho_launch(ho_test_bf16, dim3(unsigned((n / 8 + kThreads - 1) / kThreads)), dim3(kThreads), stream, static_cast<const float*>(in),
                   static_cast<bf16*>(out), static_cast<float*>(back), n);
}

// Copies 16-byte words: of uint32_t, for the third vector type.
HO_KERNEL(ho_test_words, 64)(const uint32_t* in, uint32_t* out) {
  store16(out + 4 * threadIdx.x, load_nontemporal16(in + 4 * threadIdx.x));
  if (threadIdx.x == 0) store_global(out, load_global(in) + 1u);
}

HO_EXPORT int ho_test_words_run(const void* in, void* out, void* stream) {
  return ho_launch(ho_test_words, dim3(1), dim3(kWave), stream, static_cast<const uint32_t*>(in), static_cast<uint32_t*>(out));
}

// Writes the index of its block after the number of blocks that ran before it: on the CPU this is the schedule.
HO_KERNEL(ho_test_order, 64)(int32_t* counter, int32_t* blocks, int32_t* lanes) {
  if (blockIdx.x == 0) lanes[threadIdx.x] = counter[1]++;
  wave_sync();
  if (lane_id() == 0) blocks[counter[0]++] = int32_t(blockIdx.x);
}

HO_EXPORT int ho_test_order_run(void* counter, void* blocks, void* lanes, int64_t count, void* stream) {
  return ho_launch(ho_test_order, dim3(unsigned(count)), dim3(kWave), stream, static_cast<int32_t*>(counter), static_cast<int32_t*>(blocks),
                   static_cast<int32_t*>(lanes));
}
