// SPDX-License-Identifier: Apache-2.0
// Shared by the forward and the backward of residual merge + RMSNorm or LayerNorm: the layout of a row on the lanes of a block, and its sums.
//
// Fast kernels: kHidden / 8 threads hold a row, eight elements each, and a block has at least 256 threads, hence several short rows.
// All vectors of length hidden and, in the backward, the sums over rows stay in registers while a block loops over its rows,
// so that they are read or written once per block, and the loads of the next row are in flight across the barrier of this one.
// Generic kernels: any hidden size, any mixture of dtypes, any alignment; 256 threads a row, which is read twice.
#pragma once

#include "portable.h"

// A row of the table: hidden size, then blocks a compute unit for the forward, plain and ZAYA's, and the backward, plain and
// ZAYA's. All blocks are resident from the start (registers allow 8, 6, 5 and 3 of 256 threads), and their loads in flight, 36 to
// 64 KiB a unit, are several times the bytes that cover HBM's latency. More blocks would only read the vectors and write partial sums
// more often; at 32,768 rows these are 2 to 4 % of the bytes.
// LayerNorm has the three sizes in the middle; the generic kernel takes its other rows. (At 8192 columns 1024 threads with 128 registers
// would not hold the five sums of its backward in ZAYA's form without spills.)
#define HO_LAYER_NORM_TABLE(ROW) \
  ROW(1024, 8, 4, 3, 2)          \
  ROW(2048, 8, 4, 3, 2)          \
  ROW(4096, 4, 2, 2, 1)
#define HO_RMS_NORM_TABLE(ROW) \
  ROW(256, 8, 4, 3, 2)         \
  ROW(512, 8, 4, 3, 2)         \
  HO_LAYER_NORM_TABLE(ROW)     \
  ROW(8192, 2, 1, 1, 1)

constexpr int kLaneElements = 8;
constexpr int kGenericThreads = 256;
constexpr int kGenericBlocks = 4;  // blocks per compute unit

// Flags of the host's `types` argument.
constexpr int64_t kBf16X = 1, kBf16Residual = 2, kBf16Weight = 4, kAligned = 8;

// Fast kernels are for bf16 x, weight and vectors, and for a bf16 stream in the plain form and an fp32 stream in ZAYA's.
constexpr bool has_fast_kernel(int64_t types, bool scaled) {
  return types == (kBf16X | kBf16Weight | kAligned | (scaled ? 0 : kBf16Residual));
}

constexpr int64_t blocks_for(int64_t rows, int64_t rows_per_block, int64_t most) {
  const int64_t tiles = (rows + rows_per_block - 1) / rows_per_block;
  const int64_t rounds = (tiles + most - 1) / most;  // blocks with equal numbers of rounds
  return rounds == 0 ? 0 : (tiles + rounds - 1) / rounds;
}

// Sums over rows that the backward needs: of ZAYA's merge three more, of LayerNorm that of its bias.
template <bool kScaled, bool kCentered> constexpr int kSumsOf = (kScaled ? 4 : 1) + kCentered;

__device__ __forceinline__ float to_float(float v) { return v; }
__device__ __forceinline__ float to_float(bf16 v) { return bf16_to_float(v); }
__device__ __forceinline__ void round_to(float& out, float v) { out = v; }
__device__ __forceinline__ void round_to(bf16& out, float v) { out = float_to_bf16(v); }

template <class T, int kWidth> struct PieceOf;
template <> struct PieceOf<bf16, 8> { using type = bf16x8; };
template <> struct PieceOf<bf16, 4> { using type = bf16x4; };
template <> struct PieceOf<float, 4> { using type = f32x4; };

// kHidden elements over kRowThreads threads. The widest dtype sets the width: 16 bytes of it a lane, so that neighbouring lanes
// touch neighbouring bytes of every tensor (eight fp32 in a row would be two accesses of half-used 64-byte pieces).
template <int kHidden_, class X, class R> struct Layout {
  static constexpr int kHidden = kHidden_;
  static constexpr int kWidth = 16 / max_of(int(sizeof(X)), int(sizeof(R)));
  static constexpr int kPieces = kLaneElements / kWidth;
  static constexpr int kRowThreads = kHidden / kLaneElements;
  static constexpr int kThreads = max_of(256, kRowThreads);
  static constexpr int kRows = kThreads / kRowThreads;

#if HO_HIP
  static constexpr bool kWaveRow = kRowThreads >= kWave;
#else
  static constexpr bool kWaveRow = false;  // no such broadcast on this target
#endif

  static __device__ __forceinline__ int thread() { return kRows == 1 ? int(threadIdx.x) : int(threadIdx.x) % kRowThreads; }
  // A thread's row in the block. It is the same in a whole wave where a wave has one row; then addresses are in scalar registers.
  static __device__ __forceinline__ int group() {
    if constexpr (kRows == 1) return 0;
    else if constexpr (kRowThreads >= kWave) return wave_id() / (kRowThreads / kWave);
    else return int(threadIdx.x) / kRowThreads;
  }
  static __device__ __forceinline__ int column(int piece) { return (piece * kRowThreads + thread()) * kWidth; }

  template <class T> struct Raw {
    typename PieceOf<T, kWidth>::type piece[kPieces];
  };

  template <class T> static __device__ __forceinline__ Raw<T> load(const T* row) {
    Raw<T> raw;
#pragma unroll
    for (int p = 0; p < kPieces; ++p) raw.piece[p] = *reinterpret_cast<const typename PieceOf<T, kWidth>::type*>(row + column(p));
    return raw;
  }

  // For data that no kernel reads soon.
  template <class T> static __device__ __forceinline__ Raw<T> load_once(const T* row) {
    Raw<T> raw;
#pragma unroll
    for (int p = 0; p < kPieces; ++p) {
      const auto* from = reinterpret_cast<const typename PieceOf<T, kWidth>::type*>(row + column(p));
#if HO_HIP
      raw.piece[p] = __builtin_nontemporal_load(from);
#else
      raw.piece[p] = *from;
#endif
    }
    return raw;
  }

  template <class T> static __device__ __forceinline__ void values(const Raw<T>& raw, float (&v)[kLaneElements]) {
#pragma unroll
    for (int k = 0; k < kLaneElements; ++k) v[k] = to_float(T(raw.piece[k / kWidth][k % kWidth]));
  }

  // Hides `raw` from the compiler, so that it converts again instead of keeping eight floats in registers.
  template <class T> static __device__ __forceinline__ void forget(Raw<T>& raw) {
#if HO_HIP
#pragma unroll
    for (int p = 0; p < kPieces; ++p) asm("" : "+v"(raw.piece[p]));
#endif
  }

  template <class T> static __device__ __forceinline__ void load_values(const T* row, float (&v)[kLaneElements]) { values(load(row), v); }

  // A number per row: where a wave has one row, one lane reads it (4 bytes instead of 4 per lane), and the others get it at its use.
  // A scalar load would make the row sum's LDS accesses wait for it.
  static __device__ __forceinline__ float load_row_value(const float* from) {
    if (kWaveRow && lane_id() != 0) return 0.0f;
    return *from;
  }
  static __device__ __forceinline__ float row_value(float v) {
#if HO_HIP
    if constexpr (kWaveRow) return __builtin_bit_cast(float, __builtin_amdgcn_readfirstlane(__builtin_bit_cast(int, v)));
#endif
    return v;
  }

  template <class T> static __device__ __forceinline__ void store(T* row, const float (&v)[kLaneElements]) {
#pragma unroll
    for (int p = 0; p < kPieces; ++p) {
      typename PieceOf<T, kWidth>::type piece;
#pragma unroll
      for (int k = 0; k < kWidth; ++k) {
        T rounded;
        round_to(rounded, v[p * kWidth + k]);
        piece[k] = rounded;
      }
      *reinterpret_cast<typename PieceOf<T, kWidth>::type*>(row + column(p)) = piece;
    }
  }
};

// Sum over the kRowThreads threads of a row. `slots` has kSlots<kThreads> floats: one per half wave of the block, twice,
// because a wave may write its next row's sum while another still reads this one's. It is never two rows ahead, so one barrier per row
// is enough when `parity` alternates from sum to sum (LayerNorm has two a row). (Half waves: LDS adds the halves as cheaply as a sixth exchange, and blocks of 16 waves have no collective
// over whole waves on NVIDIA.)
constexpr int kHalf = kWave / 2;
template <int kThreads> constexpr int kSlots = 2 * (kThreads / kHalf);

template <int kRowThreads, int kThreads> __device__ __forceinline__ float row_sum(float v, float* slots, int parity) {
  if constexpr (kRowThreads <= kWave) {
#pragma unroll
    for (int mask = kRowThreads / 2; mask > 0; mask >>= 1) v += wave_xor(v, mask);
    return v;
  } else {
    constexpr int kRowHalves = kRowThreads / kHalf;
#pragma unroll
    for (int mask = kHalf / 2; mask > 0; mask >>= 1) v += wave_xor(v, mask);
    float* of_block = slots + parity * (kThreads / kHalf);
    if (int(threadIdx.x) % kHalf == 0) of_block[int(threadIdx.x) / kHalf] = v;
    block_sync_lds();  // row sum
    const float* of_row = of_block + (kRowThreads == kThreads ? 0 : wave_id() * 2 / kRowHalves * kRowHalves);
    float total = 0.0f;
#pragma unroll 2  // all at once would take 32 registers for the widest rows
    for (int i = 0; i < kRowHalves; i += 4) {
      const f32x4 four = *reinterpret_cast<const f32x4*>(of_row + i);
      total += four[0] + four[1] + four[2] + four[3];
    }
    return total;
  }
}

// x' = (x + b_x) s_x + (residual + b_r) s_r, multiplied out; written with fmaf so that forward and backward agree bit for bit.
__device__ __forceinline__ float merge_shift(float b_x, float s_x, float b_r, float s_r) { return fmaf(b_x, s_x, b_r * s_r); }
__device__ __forceinline__ float merge(float x, float s_x, float residual, float s_r, float shift) { return fmaf(residual, s_r, fmaf(x, s_x, shift)); }

template <class R> __device__ __forceinline__ float as_stored(float v) {
  R rounded;
  round_to(rounded, v);
  return to_float(rounded);
}
