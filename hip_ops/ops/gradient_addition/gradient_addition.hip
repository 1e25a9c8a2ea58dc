// SPDX-License-Identifier: Apache-2.0
// Adds a bf16 gradient to an fp32 main gradient, total += part. A lane takes kPieces pieces of 8 neighbouring elements; all loads of a block come
// before its stores. Every element is read once and written once.
#include "row_vectors.h"

namespace gradient {

using namespace rows;

constexpr int kPieces = 4;  // of a lane, in flight

template <int kWidth>
__device__ __forceinline__ void add_body(float* __restrict__ total, const bf16* __restrict__ part, int64_t count) {
  constexpr int kStep = kThreads * kWidth;
  const int64_t first = int64_t(blockIdx.x) * kPieces * kStep + (wave_id() * kWave + lane_id()) * kWidth;
  Lane<bf16, kWidth> x[kPieces];
  Sums<kWidth> sums[kPieces];
#pragma unroll
  for (int p = 0; p < kPieces; ++p) {
    const int64_t at = first + p * kStep;
    if (at < count) x[p].read(part + at), sums[p].read(total + at);
  }
#pragma unroll
  for (int p = 0; p < kPieces; ++p) {
    const int64_t at = first + p * kStep;
    if (at >= count) break;
    sums[p].add(x[p]);
    sums[p].write(total + at);
  }
}

}  // namespace gradient

#define ADD_GRADIENT(name, aligned)                                                                                    \
  HO_KERNEL(name, rows::kThreads)(float* __restrict__ total, const bf16* __restrict__ part, int64_t count) {           \
    gradient::add_body<rows::kWidthOf<bf16, aligned>>(total, part, count);                                             \
  }
ADD_GRADIENT(ho_add_gradient_bf16, true)
ADD_GRADIENT(ho_add_gradient_any_bf16, false)

// aligned: both arrays start at multiples of 16 bytes, and `count` is a multiple of 8.
HO_EXPORT int ho_add_gradient(void* total, const void* part, int64_t count, int64_t aligned, void* stream) {
  const int64_t of_block = int64_t(gradient::kPieces) * rows::kThreads * (aligned ? 8 : 1), blocks = (count + of_block - 1) / of_block;
  if (blocks > INT32_MAX) return -1;
  return ho_launch(aligned ? ho_add_gradient_bf16 : ho_add_gradient_any_bf16, dim3{unsigned(blocks)}, dim3(rows::kThreads), stream,
                   static_cast<float*>(total), static_cast<const bf16*>(part), count);
}
