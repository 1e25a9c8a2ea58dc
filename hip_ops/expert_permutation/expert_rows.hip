// SPDX-License-Identifier: Apache-2.0
// Rows moved along the maps of an order of tokens by expert: as they are, or scaled, and the gradients of the scaled
// form. A padding row (expert_permutation/reference.py) is not read; zeros are written in its place.
#include "row_vectors.h"

namespace rows {

template <class T, int kWidth>
struct CopyWork {
  const T* from;
  T* to;
  bool live;
  float scale;

  // kScaled: T is the number's type; else any type of the same size will do.
  template <int kNow> __device__ __forceinline__ void run(int at) { move<kNow, false>(at); }

  template <int kNow, bool kScaled> __device__ __forceinline__ void move(int at) {
    constexpr int kStep = kWave * kWidth;
    Lane<T, kWidth> piece[kNow];
#pragma unroll
    for (int p = 0; p < kNow; ++p) {
      if (live) piece[p].read(from + at + p * kStep);
      else piece[p] = zeros<T, kWidth>();
    }
#pragma unroll
    for (int p = 0; p < kNow; ++p) {
      if constexpr (kScaled) {
#pragma unroll
        for (int i = 0; i < kWidth; ++i) piece[p].set(i, rounded<T>(to_float(piece[p].get(i)) * scale));
      }
      piece[p].write(to + at + p * kStep);
    }
  }
};

template <class T, int kWidth>
struct ScaleWork : CopyWork<T, kWidth> {
  template <int kNow> __device__ __forceinline__ void run(int at) { this->template move<kNow, true>(at); }
};

// out[i] = source[index[i]], and side_out[i] = side[index[i]] where there is a side; zeros where index[i] is negative.
template <class T, bool kAligned>
__device__ __forceinline__ void gather_body(const T* __restrict__ source, const int32_t* __restrict__ index, const void* __restrict__ side,
                                            T* __restrict__ out, void* __restrict__ side_out, int64_t count, int hidden,
                                            int64_t source_stride, int side_bytes) {
  constexpr int kWidth = kWidthOf<T, kAligned>, kPieces = 4;
  for (int64_t row = first_row(); row < count; row += row_step()) {
    const int entry = index[row];
    const bool live = entry >= 0;
    CopyWork<T, kWidth> work{source + (live ? entry * source_stride : 0), out + row * hidden, live, 1.0f};
    for_each_piece<kPieces, kWidth>(hidden, work);
    if (side && lane_id() == 0) {
      if (side_bytes == 4) static_cast<uint32_t*>(side_out)[row] = live ? static_cast<const uint32_t*>(side)[entry] : 0u;
      else static_cast<uint16_t*>(side_out)[row] = live ? static_cast<const uint16_t*>(side)[entry] : uint16_t(0);
    }
  }
}

// out[i] = scale[i] * source[index[i]], in fp32 and rounded once.
template <class T, bool kAligned>
__device__ __forceinline__ void scale_gather_body(const T* __restrict__ source, const int32_t* __restrict__ index,
                                                  const void* __restrict__ scale, T* __restrict__ out, int64_t count, int hidden,
                                                  int64_t source_stride, int bf16_scale) {
  constexpr int kWidth = kWidthOf<T, kAligned>, kPieces = 4;
  for (int64_t row = first_row(); row < count; row += row_step()) {
    const int entry = index[row];
    const bool live = entry >= 0;
    ScaleWork<T, kWidth> work{{source + (live ? entry * source_stride : 0), out + row * hidden, live,
                                        live ? load_number(scale, row, bf16_scale) : 0.0f}};
    for_each_piece<kPieces, kWidth>(hidden, work);
  }
}

template <class T, int kWidth>
struct BackwardWork {
  const T* grad;
  const T* source;
  T* d_source;
  float scale, dot;

  template <int kNow> __device__ __forceinline__ void run(int at) {
    constexpr int kStep = kWave * kWidth;
    Lane<T, kWidth> upstream[kNow], value[kNow];
#pragma unroll
    for (int p = 0; p < kNow; ++p) upstream[p].read(grad + at + p * kStep), value[p].read(source + at + p * kStep);
#pragma unroll
    for (int p = 0; p < kNow; ++p) {
#pragma unroll
      for (int i = 0; i < kWidth; ++i) {
        const float g = to_float(upstream[p].get(i));
        dot = fmaf(g, to_float(value[p].get(i)), dot);
        upstream[p].set(i, rounded<T>(g * scale));
      }
      upstream[p].write(d_source + at + p * kStep);
    }
  }
};

// d_source[r] = scale[t] * grad[t] and d_scale[t] = sum(grad[t] * source[r]), where inverse[r] stands for t.
template <class T, bool kAligned>
__device__ __forceinline__ void scale_gather_backward_body(const T* __restrict__ grad, const T* __restrict__ source,
                                                           const int32_t* __restrict__ inverse, const void* __restrict__ scale,
                                                           T* __restrict__ d_source, void* __restrict__ d_scale, int64_t count, int hidden,
                                                           int64_t grad_stride, int64_t source_stride, int bf16_scale) {
  constexpr int kWidth = kWidthOf<T, kAligned>, kPieces = 2;
  for (int64_t row = first_row(); row < count; row += row_step()) {
    const int entry = inverse[row], place = place_of(entry);
    float dot = 0.0f;
    if (entry >= 0) {
      BackwardWork<T, kWidth> work{grad + place * grad_stride, source + row * source_stride, d_source + row * hidden,
                                   load_number(scale, place, bf16_scale), 0.0f};
      for_each_piece<kPieces, kWidth>(hidden, work);
      dot = work.dot;
    } else {
      CopyWork<T, kWidth> work{source, d_source + row * hidden, false, 0.0f};
      for_each_piece<kPieces, kWidth>(hidden, work);
    }
    dot = wave_sum(dot);
    if (lane_id() == 0) store_number(d_scale, place, bf16_scale, dot);
  }
}

}  // namespace rows

#define GATHER(name, T, aligned)                                                                                                    \
  HO_KERNEL(name, rows::kThreads)(const T* __restrict__ source, const int32_t* __restrict__ index, const void* __restrict__ side,   \
                                  T* __restrict__ out, void* __restrict__ side_out, int64_t count, int hidden,                      \
                                  int64_t source_stride, int side_bytes) {                                                          \
    rows::gather_body<T, aligned>(source, index, side, out, side_out, count, hidden, source_stride, side_bytes);                    \
  }
GATHER(ho_gather_rows_16, uint32_t, true)  // rows of 16-byte pieces, counted in words of 4
GATHER(ho_gather_rows_4, uint32_t, false)
GATHER(ho_gather_rows_2, uint16_t, false)

#define SCALE_GATHER(name, T, aligned)                                                                                              \
  HO_KERNEL(name, rows::kThreads)(const T* __restrict__ source, const int32_t* __restrict__ index, const void* __restrict__ scale,  \
                                  T* __restrict__ out, int64_t count, int hidden, int64_t source_stride, int bf16_scale) {          \
    rows::scale_gather_body<T, aligned>(source, index, scale, out, count, hidden, source_stride, bf16_scale);                       \
  }
SCALE_GATHER(ho_scale_gather_rows_bf16, bf16, true)
SCALE_GATHER(ho_scale_gather_rows_fp32, float, true)
SCALE_GATHER(ho_scale_gather_rows_any_bf16, bf16, false)
SCALE_GATHER(ho_scale_gather_rows_any_fp32, float, false)

#define SCALE_GATHER_BACKWARD(name, T, aligned)                                                                                     \
  HO_KERNEL(name, rows::kThreads)(const T* __restrict__ grad, const T* __restrict__ source, const int32_t* __restrict__ inverse,    \
                                  const void* __restrict__ scale, T* __restrict__ d_source, void* __restrict__ d_scale,             \
                                  int64_t count, int hidden, int64_t grad_stride, int64_t source_stride, int bf16_scale) {          \
    rows::scale_gather_backward_body<T, aligned>(grad, source, inverse, scale, d_source, d_scale, count, hidden, grad_stride,       \
                                                 source_stride, bf16_scale);                                                        \
  }
SCALE_GATHER_BACKWARD(ho_scale_gather_rows_backward_bf16, bf16, true)
SCALE_GATHER_BACKWARD(ho_scale_gather_rows_backward_fp32, float, true)
SCALE_GATHER_BACKWARD(ho_scale_gather_rows_backward_any_bf16, bf16, false)
SCALE_GATHER_BACKWARD(ho_scale_gather_rows_backward_any_fp32, float, false)

// Launchers. element_bytes: 2 or 4; aligned: every row of every tensor starts and ends at a multiple of 16 bytes; blocks: at most one a
// group of rows::kWaves rows, fewer make a wave go on to further rows.
HO_EXPORT int ho_gather_rows(const void* source, const void* index, const void* side, void* out, void* side_out, int64_t count,
                             int64_t hidden, int64_t source_stride, int64_t element_bytes, int64_t side_bytes, int64_t aligned,
                             int64_t blocks, void* stream) {
  if ((element_bytes != 2 && element_bytes != 4) || (side && side_bytes != 2 && side_bytes != 4) || hidden > INT32_MAX) return -1;
  const dim3 grid{unsigned(blocks)}, block(rows::kThreads);
  const int32_t* const map = static_cast<const int32_t*>(index);
  if (aligned || element_bytes == 4) {
    const int64_t words = element_bytes == 2 ? 2 : 1;
    return ho_launch(aligned ? ho_gather_rows_16 : ho_gather_rows_4, grid, block, stream, static_cast<const uint32_t*>(source), map, side,
                     static_cast<uint32_t*>(out), side_out, count, int(hidden / words), source_stride / words, int(side_bytes));
  }
  return ho_launch(ho_gather_rows_2, grid, block, stream, static_cast<const uint16_t*>(source), map, side, static_cast<uint16_t*>(out),
                   side_out, count, int(hidden), source_stride, int(side_bytes));
}

HO_EXPORT int ho_scale_gather_rows(const void* source, const void* index, const void* scale, void* out, int64_t count, int64_t hidden,
                                   int64_t source_stride, int64_t element_bytes, int64_t scale_bytes, int64_t aligned, int64_t blocks,
                                   void* stream) {
  if ((element_bytes != 2 && element_bytes != 4) || (scale_bytes != 2 && scale_bytes != 4) || hidden > INT32_MAX) return -1;
  const dim3 grid{unsigned(blocks)}, block(rows::kThreads);
  const int32_t* const map = static_cast<const int32_t*>(index);
  if (element_bytes == 2)
    return ho_launch(aligned ? ho_scale_gather_rows_bf16 : ho_scale_gather_rows_any_bf16, grid, block, stream, static_cast<const bf16*>(source),
                     map, scale, static_cast<bf16*>(out), count, int(hidden), source_stride, int(scale_bytes == 2));
  return ho_launch(aligned ? ho_scale_gather_rows_fp32 : ho_scale_gather_rows_any_fp32, grid, block, stream, static_cast<const float*>(source),
                   map, scale, static_cast<float*>(out), count, int(hidden), source_stride, int(scale_bytes == 2));
}

HO_EXPORT int ho_scale_gather_rows_backward(const void* grad, const void* source, const void* inverse, const void* scale, void* d_source,
                                            void* d_scale, int64_t count, int64_t hidden, int64_t grad_stride, int64_t source_stride,
                                            int64_t element_bytes, int64_t scale_bytes, int64_t aligned, int64_t blocks, void* stream) {
  if ((element_bytes != 2 && element_bytes != 4) || (scale_bytes != 2 && scale_bytes != 4) || hidden > INT32_MAX) return -1;
  const dim3 grid{unsigned(blocks)}, block(rows::kThreads);
  const int32_t* const map = static_cast<const int32_t*>(inverse);
  if (element_bytes == 2)
    return ho_launch(aligned ? ho_scale_gather_rows_backward_bf16 : ho_scale_gather_rows_backward_any_bf16, grid, block, stream,
                     static_cast<const bf16*>(grad), static_cast<const bf16*>(source), map, scale, static_cast<bf16*>(d_source), d_scale,
                     count, int(hidden), grad_stride, source_stride, int(scale_bytes == 2));
  return ho_launch(aligned ? ho_scale_gather_rows_backward_fp32 : ho_scale_gather_rows_backward_any_fp32, grid, block, stream,
                   static_cast<const float*>(grad), static_cast<const float*>(source), map, scale, static_cast<float*>(d_source), d_scale,
                   count, int(hidden), grad_stride, source_stride, int(scale_bytes == 2));
}
