// SPDX-License-Identifier: Apache-2.0
// Streams over a list of tensors of any shapes in one launch: the work table of multi_tensor.py, and the loop of a block's
// threads over a chunk.
//
// These kernels are bound by memory, so whole transactions and bytes in flight decide. A lane's vector is 16 bytes of the widest
// type and a wave's vectors are contiguous, hence every instruction moves full 64-byte pieces of each tensor. bf16 beside fp32
// takes 8 bytes per lane: with 16 the fp32 accesses would be strided and need twice the transactions. Loads of kFlight
// elements of every tensor are issued before the first store, since no compiler may move a load above a store through an address
// that came from memory.
#pragma once

#include "portable.h"

namespace multi_tensor {

// ROW_WORDS words, as multi_tensor.py packs them.
struct Row {
  uint64_t address[3];
  int64_t numel;
  int32_t first_chunk;
  int32_t head;
  float scale;
  int32_t place;
};
static_assert(sizeof(Row) == 48, "a row of the work table is six 8-byte words");

constexpr int kThreads = 256;
constexpr int kFlight = 16;

__device__ __forceinline__ float to_float(float value) { return value; }
__device__ __forceinline__ float to_float(bf16 value) { return bf16_to_float(value); }
template <class T> __device__ __forceinline__ T rounded(float value) {
  if constexpr (sizeof(T) == 2) return float_to_bf16(value);
  else return value;
}

template <class... T> __host__ __device__ constexpr int vector_width() {
  int widest = 0;
  for (int bytes : {int(sizeof(T))...}) widest = bytes > widest ? bytes : widest;
  return 16 / widest;
}

// `n` neighbouring elements of one lane, read or written in one access: 1, or what makes 8 or 16 bytes.
template <class T, int n> struct LaneOf;
template <class T> struct LaneOf<T, 1> {
  struct type {
    T value;
    __device__ __forceinline__ T& operator[](int) { return value; }
  };
};
template <> struct LaneOf<float, 4> { using type = f32x4; };
template <> struct LaneOf<bf16, 4> { using type = bf16x4; };
template <> struct LaneOf<bf16, 8> { using type = bf16x8; };
template <class T, int n> using Lane = typename LaneOf<T, n>::type;

// The data is not used again while it is cached, so 16-byte accesses are non-temporal.
template <int n, class T> __device__ __forceinline__ Lane<T, n> read_once(const T* from) {
  if constexpr (n == 1) return {load_global(from)};
  else if constexpr (n * sizeof(T) == 16) return load_nontemporal16(from);
  else return load_global(reinterpret_cast<const Lane<T, n>*>(from));
}
template <int n, class T> __device__ __forceinline__ void write_once(T* to, Lane<T, n> lane) {
  if constexpr (n == 1) store_global(to, lane.value);
  else if constexpr (n * sizeof(T) == 16) store_nontemporal16(to, lane);
  else store_global(reinterpret_cast<Lane<T, n>*>(to), lane);
}

// One chunk of one tensor. `base` is the first element that is aligned for vectors; the head, if there is one, is before it.
struct Chunk {
  int64_t base;
  int count;    // elements from base on
  int vectors;  // how many of these can be accessed as vectors
  int head;     // elements before base that belong to this chunk
};

template <int kWidth> __device__ __forceinline__ Chunk chunk_of(const Row& row, int chunk, int chunk_elements) {
  const int skipped = row.head > 0 ? row.head : 0;
  Chunk c;
  c.base = skipped + int64_t(chunk - row.first_chunk) * chunk_elements;
  c.count = row.numel - c.base < chunk_elements ? int(row.numel - c.base) : chunk_elements;
  c.vectors = row.head < 0 ? 0 : c.count / kWidth * kWidth;
  c.head = chunk == row.first_chunk ? skipped : 0;
  return c;
}

// This thread's share of a chunk: `work.template run<vectors, width>(at)` does `vectors` vectors of `width` elements, the
// first at element `at` from the base, each kThreads vectors after the one before.
template <int kWidth, class Work> __device__ __forceinline__ void for_each_element(const Chunk& c, Work& work) {
  constexpr int kStride = kThreads * kWidth, kVectors = kFlight / kWidth;
  int at = int(threadIdx.x) * kWidth;
  for (; at + (kVectors - 1) * kStride < c.vectors; at += kVectors * kStride) work.template run<kVectors, kWidth>(at);
  for (; at < c.vectors; at += kStride) work.template run<1, kWidth>(at);
  for (int i = c.vectors + int(threadIdx.x); i < c.count; i += kThreads) work.template run<1, 1>(i);
  if (int(threadIdx.x) < c.head) work.template run<1, 1>(int(threadIdx.x) - c.head);
}

// The rows of chunks follow those of tensors.
inline const int32_t* chunk_rows_of(const void* table, int64_t tensors) {
  return reinterpret_cast<const int32_t*>(static_cast<const Row*>(table) + tensors);
}

}  // namespace multi_tensor
