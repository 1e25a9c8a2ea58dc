// SPDX-License-Identifier: Apache-2.0
// Shared by the kernels on rows of logits: exponentials, maxima of possibly no numbers, and parts of rows.
#pragma once

#include "row_vectors.h"

namespace vocabulary {

using namespace rows;

constexpr float kNothing = -__builtin_inff();  // the maximum of no numbers

__device__ __forceinline__ float exponential(float x) {
#if HO_HIP
  return __builtin_amdgcn_exp2f(x * 1.44269504f);  // relative error |x| ULP / 2: a probability of 1e-9 is exact to 1e-6
#else
  return expf(x);
#endif
}

__device__ __forceinline__ float wave_max(float v) {
#pragma unroll
  for (int mask = kWave / 2; mask > 0; mask >>= 1) v = fmaxf(v, wave_xor(v, mask));
  return v;
}

// The number to subtract before exponentials are summed: the maximum, or 0 where there is no number yet.
__device__ __forceinline__ float shift_of(float largest) { return largest == kNothing ? 0.0f : largest; }

// The classes [start, end) of the block's part of every row.
struct Part {
  int start, end;
};

__device__ __forceinline__ Part this_part(int size, int classes) {
  const int64_t start = int64_t(blockIdx.y) * size;
  return {int(min_of<int64_t>(start, classes)), int(min_of<int64_t>(start + size, classes))};
}

// The lane that has class `label` of the row, if lanes take a part of `size` classes kWidth at a time.
template <int kWidth>
__device__ __forceinline__ int label_lane(int label, int size) {
  return label % size / kWidth % kWave;
}

}  // namespace vocabulary
