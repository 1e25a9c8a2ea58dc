// SPDX-License-Identifier: Apache-2.0
// Row access of the generic RMSNorm kernels: dtype and alignment are known at run time, tails are masked.
#pragma once

#include "rms_norm.h"

// A tensor's elements at + [0, count), count <= 8, as 16-byte vectors if there are eight and they are aligned.
struct AnyRow {
  const void* base;
  bool is_bf16;
  bool aligned;

  __device__ __forceinline__ void load(int64_t at, int count, float (&v)[kLaneElements]) const {
    if (aligned && count == kLaneElements) {
      if (is_bf16) {
        const auto piece = load16(static_cast<const bf16*>(base) + at);
#pragma unroll
        for (int k = 0; k < kLaneElements; ++k) v[k] = bf16_to_float(piece[k]);
      } else {
        const auto low = load16(static_cast<const float*>(base) + at), high = load16(static_cast<const float*>(base) + at + 4);
#pragma unroll
        for (int k = 0; k < 4; ++k) v[k] = low[k], v[k + 4] = high[k];
      }
      return;
    }
#pragma unroll
    for (int k = 0; k < kLaneElements; ++k) {
      if (k >= count) v[k] = 0.0f;
      else v[k] = is_bf16 ? bf16_to_float(static_cast<const bf16*>(base)[at + k]) : static_cast<const float*>(base)[at + k];
    }
  }

  // Rounds `v` to the dtype, stores it, and leaves in `v` what was stored.
  __device__ __forceinline__ void store(int64_t at, int count, float (&v)[kLaneElements]) const {
    if (is_bf16) store_as(static_cast<bf16*>(const_cast<void*>(base)) + at, count, v);
    else store_as(static_cast<float*>(const_cast<void*>(base)) + at, count, v);
  }

 private:
  template <class T> __device__ __forceinline__ void store_as(T* to, int count, float (&v)[kLaneElements]) const {
    constexpr int kWidth = 16 / int(sizeof(T));
    T rounded[kLaneElements];
#pragma unroll
    for (int k = 0; k < kLaneElements; ++k) {
      round_to(rounded[k], v[k]);
      v[k] = to_float(rounded[k]);
    }
    if (aligned && count == kLaneElements) {
#pragma unroll
      for (int first = 0; first < kLaneElements; first += kWidth) {
        typename PieceOf<T, kWidth>::type piece;
#pragma unroll
        for (int k = 0; k < kWidth; ++k) piece[k] = rounded[first + k];
        store16(to + first, piece);
      }
      return;
    }
#pragma unroll
    for (int k = 0; k < kLaneElements; ++k) {
      if (k < count) to[k] = rounded[k];
    }
  }
};

__device__ __forceinline__ int columns_of_lane(int column, int hidden) { return min_of(max_of(hidden - column, 0), kLaneElements); }
