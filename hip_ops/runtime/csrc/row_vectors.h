// SPDX-License-Identifier: Apache-2.0
// A wave processes one row: 16 bytes per lane where all rows are aligned to 16 bytes, otherwise one element per lane. The next wave has the
// next row, so that only a row's sum crosses lanes, and blocks need neither LDS nor barriers.
//
// These kernels are bound by memory: all loads of a batch are issued before its first store, and data that is read once is read non-temporally.
#pragma once

#include "portable.h"

namespace rows {

constexpr int kThreads = 256, kWaves = kThreads / kWave;

// Elements a lane has of one access.
template <class T, bool kAligned>
constexpr int kWidthOf = kAligned ? 16 / int(sizeof(T)) : 1;

__device__ __forceinline__ float to_float(float value) { return value; }
__device__ __forceinline__ float to_float(bf16 value) { return bf16_to_float(value); }

template <class T>
__device__ __forceinline__ T rounded(float value) {
  if constexpr (sizeof(T) == 2) return float_to_bf16(value);
  else return value;
}

// One number of a vector of either type; `is_bf16` is the same for all lanes.
__device__ __forceinline__ float load_number(const void* from, int64_t at, bool is_bf16) {
  return is_bf16 ? bf16_to_float(load_global(static_cast<const bf16*>(from) + at)) : load_global(static_cast<const float*>(from) + at);
}
__device__ __forceinline__ void store_number(void* to, int64_t at, bool is_bf16, float value) {
  if (is_bf16) store_global(static_cast<bf16*>(to) + at, float_to_bf16(value));
  else store_global(static_cast<float*>(to) + at, value);
}

// kWidth neighbouring elements of one lane in memory order: 1, or 16 bytes' worth.
template <class T, int kWidth>
struct Lane {
  ho::Vector16<T> v;
  __device__ __forceinline__ void read(const T* from) { v = load_nontemporal16(from); }
  __device__ __forceinline__ void write(T* to) const { store16(to, v); }
  __device__ __forceinline__ T get(int i) const { return v[i]; }
  __device__ __forceinline__ void set(int i, T value) { v[i] = value; }
};
template <class T>
struct Lane<T, 1> {
  T v;
  __device__ __forceinline__ void read(const T* from) { v = load_global(from); }
  __device__ __forceinline__ void write(T* to) const { store_global(to, v); }
  __device__ __forceinline__ T get(int) const { return v; }
  __device__ __forceinline__ void set(int, T value) { v = value; }
};

template <class T, int kWidth>
__device__ __forceinline__ Lane<T, kWidth> zeros() {
  Lane<T, kWidth> lane;
#pragma unroll
  for (int i = 0; i < kWidth; ++i) lane.set(i, T(0));
  return lane;
}

// fp32 sums of kWidth neighbouring elements of one lane: 8 or 4 if all arrays are aligned to 16 bytes, otherwise 1.
template <int kWidth>
struct Sums {
  float v[kWidth];

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int i = 0; i < kWidth; ++i) v[i] = 0.0f;
  }
  template <class T> __device__ __forceinline__ void add(const Lane<T, kWidth>& x) {
#pragma unroll
    for (int i = 0; i < kWidth; ++i) v[i] += to_float(x.get(i));
  }
  __device__ __forceinline__ void read(const float* from) {
    if constexpr (kWidth == 1) v[0] = load_global(from);
    else
#pragma unroll
      for (int i = 0; i < kWidth; i += 4) {
        const ho::Vector16<float> x = load16(from + i);
#pragma unroll
        for (int j = 0; j < 4; ++j) v[i + j] = x[j];
      }
  }
  __device__ __forceinline__ void add_from(const float* from) {
    Sums x;
    x.read(from);
#pragma unroll
    for (int i = 0; i < kWidth; ++i) v[i] += x.v[i];
  }
  __device__ __forceinline__ void write(float* to) const {
    if constexpr (kWidth == 1) store_global(to, v[0]);
    else
#pragma unroll
      for (int i = 0; i < kWidth; i += 4) {
        ho::Vector16<float> x;
#pragma unroll
        for (int j = 0; j < 4; ++j) x[j] = v[i + j];
        store16(to + i, x);
      }
  }
  __device__ __forceinline__ void add_to(float* total) {
    add_from(total);
    write(total);
  }
};

// This lane's share of a row of `count` elements: `work.template run<pieces>(at)` does `pieces` accesses, the first at element `at`, each
// kStep elements after the one before.
template <int kPieces, int kWidth, class Work>
__device__ __forceinline__ void for_each_piece(int count, Work& work) {
  constexpr int kStep = kWave * kWidth;
  int at = lane_id() * kWidth;
  for (; at + (kPieces - 1) * kStep < count; at += kPieces * kStep) work.template run<kPieces>(at);
  for (; at < count; at += kStep) work.template run<1>(at);
}

// A wave's first row, and the distance to its next one.
__device__ __forceinline__ int64_t first_row() { return int64_t(blockIdx.x) * kWaves + wave_id(); }
__device__ __forceinline__ int64_t row_step() { return int64_t(gridDim.x) * kWaves; }

}  // namespace rows
