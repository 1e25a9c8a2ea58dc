// SPDX-License-Identifier: Apache-2.0
// Second launch of the backward of RMSNorm and LayerNorm: adds partial [blocks][kSumsOf][hidden] over the blocks, always in the same order, and computes
// the gradients of the vectors from the sums (formulas: rms_norm_backward.hip). A block of threads has 16 columns, so that even 2048
// columns give enough blocks, and reads whole 64-byte pieces; 32 threads share a column and take every 32nd row of partial each.
#include "rms_norm.h"

constexpr int kColumns = 16, kSlices = 32, kSumThreads = kColumns * kSlices;

__device__ __forceinline__ float load_as(const void* from, int at, bool is_bf16) {
  return is_bf16 ? bf16_to_float(static_cast<const bf16*>(from)[at]) : static_cast<const float*>(from)[at];
}

__device__ __forceinline__ void store_as(void* to, int at, bool is_bf16, float v) {
  if (is_bf16) static_cast<bf16*>(to)[at] = float_to_bf16(v);
  else static_cast<float*>(to)[at] = v;
}

// The first kColumns threads get all sums of their columns.
template <int kSums>
__device__ __forceinline__ void sum_partial(const float* partial, int64_t blocks, int hidden, float (&total)[kSums]) {
  HO_LDS(float, slices, kSums * kSumThreads);
  HO_LDS(float, totals, kSums * kColumns);
  const int thread = int(threadIdx.x), column = int(blockIdx.x) * kColumns + thread % kColumns;
#pragma unroll
  for (int s = 0; s < kSums; ++s) total[s] = 0.0f;
  if (column < hidden) {
#pragma unroll 4
    for (int64_t block = thread / kColumns; block < blocks; block += kSlices) {
#pragma unroll
      for (int s = 0; s < kSums; ++s) total[s] += partial[(block * kSums + s) * hidden + column];
    }
  }
#pragma unroll
  for (int s = 0; s < kSums; ++s) slices[s * kSumThreads + thread] = total[s];
  block_sync_lds();  // slices
  if (wave_id() < kSums) {
    float sum = 0.0f;
    for (int i = 0; i < kSumThreads / kWave; ++i) sum += slices[wave_id() * kSumThreads + i * kWave + lane_id()];
    sum += wave_xor(sum, 16);
    sum += wave_xor(sum, 32);
    if (lane_id() < kColumns) totals[wave_id() * kColumns + lane_id()] = sum;
  }
  block_sync_lds();
#pragma unroll
  for (int s = 0; s < kSums; ++s) total[s] = totals[s * kColumns + thread % kColumns];
}

template <bool kCentered>
__device__ __forceinline__ void sum_weight(const float* partial, void* d_weight, int64_t blocks, int hidden, int64_t types, void* d_bias = nullptr) {
  constexpr int kSums = kSumsOf<false, kCentered>;
  float total[kSums];
  sum_partial<kSums>(partial, blocks, hidden, total);
  const int column = int(blockIdx.x) * kColumns + int(threadIdx.x);
  if (threadIdx.x >= kColumns || column >= hidden) return;
  store_as(d_weight, column, types & kBf16Weight, total[0]);
  if constexpr (kCentered) store_as(d_bias, column, types & kBf16Weight, total[1]);
}

template <bool kCentered>
__device__ __forceinline__ void sum_vectors(
    const float* partial, const void* x_bias, const void* x_scale, const void* residual_bias, const void* residual_scale, void* d_x_bias,
    void* d_x_scale, void* d_residual_bias, void* d_residual_scale, void* d_weight, int64_t blocks, int hidden, int64_t types,
    void* d_bias = nullptr) {
  constexpr int kSums = kSumsOf<true, kCentered>;
  float total[kSums];
  sum_partial<kSums>(partial, blocks, hidden, total);
  const int column = int(blockIdx.x) * kColumns + int(threadIdx.x);
  if (threadIdx.x >= kColumns || column >= hidden) return;
  const bool is_bf16 = types & kBf16Weight;
  store_as(d_x_bias, column, is_bf16, total[0] * load_as(x_scale, column, is_bf16));
  store_as(d_x_scale, column, is_bf16, fmaf(total[0], load_as(x_bias, column, is_bf16), total[1]));
  store_as(d_residual_bias, column, is_bf16, total[0] * load_as(residual_scale, column, is_bf16));
  store_as(d_residual_scale, column, is_bf16, fmaf(total[0], load_as(residual_bias, column, is_bf16), total[2]));
  store_as(d_weight, column, is_bf16, total[3]);
  if constexpr (kCentered) store_as(d_bias, column, is_bf16, total[4]);
}

// RMSNorm's kernels keep their own parameters, without LayerNorm's d_bias, and so their code.
#define BIAS_PARAMETER , void* d_bias
#define BIAS_ARGUMENT , d_bias
#define SUM(norm, kCentered, parameter, argument)                                                                                    \
  HO_KERNEL(norm##_sum_weight, kSumThreads)                                                                                          \
  (const float* partial, void* d_weight, int64_t blocks, int hidden, int64_t types parameter) {                                      \
    sum_weight<kCentered>(partial, d_weight, blocks, hidden, types argument);                                                        \
  }                                                                                                                                  \
  HO_KERNEL(norm##_sum_vectors, kSumThreads)                                                                                         \
  (const float* partial, const void* x_bias, const void* x_scale, const void* residual_bias, const void* residual_scale, void* d_x_bias, \
   void* d_x_scale, void* d_residual_bias, void* d_residual_scale, void* d_weight, int64_t blocks, int hidden, int64_t types parameter) { \
    sum_vectors<kCentered>(partial, x_bias, x_scale, residual_bias, residual_scale, d_x_bias, d_x_scale, d_residual_bias,            \
                           d_residual_scale, d_weight, blocks, hidden, types argument);                                              \
  }
SUM(ho_rms_norm, false, , )
SUM(ho_layer_norm, true, BIAS_PARAMETER, BIAS_ARGUMENT)

// Null merge vectors: only d_weight and, unless it is null, as in RMSNorm, d_bias.
HO_EXPORT int ho_rms_norm_backward_sum(const void* partial, const void* x_bias, const void* x_scale, const void* residual_bias,
                                       const void* residual_scale, void* d_x_bias, void* d_x_scale, void* d_residual_bias,
                                       void* d_residual_scale, void* d_weight, void* d_bias, int64_t blocks, int64_t hidden,
                                       int64_t types, void* stream) {
  if (hidden < 1 || hidden > INT32_MAX) return -1;
  const dim3 grid(unsigned((hidden + kColumns - 1) / kColumns)), block(kSumThreads);
#define LAUNCH(norm, ...)                                                                                                            \
  if (!x_scale)                                                                                                                      \
    return ho_launch(norm##_sum_weight, grid, block, stream, static_cast<const float*>(partial), d_weight, blocks, int(hidden),      \
                     types __VA_ARGS__);                                                                                             \
  return ho_launch(norm##_sum_vectors, grid, block, stream, static_cast<const float*>(partial), x_bias, x_scale, residual_bias,      \
                   residual_scale, d_x_bias, d_x_scale, d_residual_bias, d_residual_scale, d_weight, blocks, int(hidden), types __VA_ARGS__)
  if (d_bias) { LAUNCH(ho_layer_norm, , d_bias); }
  LAUNCH(ho_rms_norm, );
}
