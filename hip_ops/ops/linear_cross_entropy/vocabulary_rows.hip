// SPDX-License-Identifier: Apache-2.0
// Cross-entropy over rows of logits: computes statistics of parts of rows, and overwrites logits with their gradient. A wave per part of a
// row, part blockIdx.y.
// Conventions: reference.py. Arithmetic is fp32, each result rounded once.
#include "vocabulary.h"

namespace vocabulary {

template <class T, int kWidth>
struct StatisticsWork {
  const T* logits;
  float largest, total;

  template <int kNow> __device__ __forceinline__ void run(int at) {
    constexpr int kStep = kWave * kWidth;
    Lane<T, kWidth> x[kNow];
#pragma unroll
    for (int p = 0; p < kNow; ++p) x[p].read(logits + at + p * kStep);
    float top = largest;
#pragma unroll
    for (int p = 0; p < kNow; ++p)
#pragma unroll
      for (int i = 0; i < kWidth; ++i) top = fmaxf(top, to_float(x[p].get(i)));
    const float shift = shift_of(top);
    float sum = total * exponential(largest - shift);
#pragma unroll
    for (int p = 0; p < kNow; ++p)
#pragma unroll
      for (int i = 0; i < kWidth; ++i) sum += exponential(to_float(x[p].get(i)) - shift);
    largest = top, total = sum;
  }
};

template <class T, int kWidth>
struct GradientWork {
  T* logits;
  int label;  // column in the part, or -1 outside
  float top, log_sum, factor, upstream;

  template <int kNow> __device__ __forceinline__ void run(int at) {
    constexpr int kStep = kWave * kWidth;
    Lane<T, kWidth> x[kNow];
#pragma unroll
    for (int p = 0; p < kNow; ++p) x[p].read(logits + at + p * kStep);
#pragma unroll
    for (int p = 0; p < kNow; ++p) {
      const int place = label - (at + p * kStep);
#pragma unroll
      for (int i = 0; i < kWidth; ++i) {
        const float d = exponential((to_float(x[p].get(i)) - top) - log_sum) * factor - (i == place ? 1.0f : 0.0f);
        x[p].set(i, rounded<T>(d * upstream));
      }
      x[p].write(logits + at + p * kStep);
    }
  }
};

template <class T, bool kAligned>
__device__ __forceinline__ void statistics_body(const T* __restrict__ logits, const int64_t* __restrict__ labels, float* __restrict__ statistics,
                                                int64_t count, int classes, int64_t stride, int64_t first_class, int size) {
  constexpr int kWidth = kWidthOf<T, kAligned>, kPieces = 4;
  const Part part = this_part(size, classes);
  for (int64_t row = first_row(); row < count; row += row_step()) {
    const T* const values = logits + row * stride;
    StatisticsWork<T, kWidth> work{values + part.start, kNothing, 0.0f};
    for_each_piece<kPieces, kWidth>(part.end - part.start, work);
    const float largest = wave_max(work.largest);
    const float total = wave_sum(work.total * exponential(work.largest - shift_of(largest)));
    if (lane_id() == 0) {
      const int64_t label = load_global(labels + row) - first_class;
      float* const to = statistics + int64_t(blockIdx.y) * 3 * count + row;
      store_global(to, largest);
      store_global(to + count, total);
      store_global(to + 2 * count, label >= part.start && label < part.end ? to_float(load_global(values + label)) : 0.0f);
    }
  }
}

template <class T, bool kAligned>
__device__ __forceinline__ void gradient_body(T* __restrict__ logits, const int64_t* __restrict__ labels, const float* __restrict__ normalizer,
                                              const float* __restrict__ grad, int64_t count, int classes, int64_t stride, int64_t normalizer_stride,
                                              int64_t first_class, int size, float z_loss) {
  constexpr int kWidth = kWidthOf<T, kAligned>, kPieces = 4;
  const Part part = this_part(size, classes);
  for (int64_t row = first_row(); row < count; row += row_step()) {
    const float top = load_global(normalizer + row), log_sum = load_global(normalizer + normalizer_stride + row);
    const int64_t label = load_global(labels + row) - first_class;
    const bool here = label >= part.start && label < part.end;
    GradientWork<T, kWidth> work{logits + row * stride + part.start, here ? int(label) - part.start : -1, top, log_sum,
                                 fmaf(2.0f * z_loss, top + log_sum, 1.0f), load_global(grad + row)};
    for_each_piece<kPieces, kWidth>(part.end - part.start, work);
  }
}

}  // namespace vocabulary

#define STATISTICS(name, T, aligned)                                                                                                     \
  HO_KERNEL(name, rows::kThreads)(const T* __restrict__ logits, const int64_t* __restrict__ labels, float* __restrict__ statistics,     \
                                  int64_t count, int classes, int64_t stride, int64_t first_class, int size) {               \
    vocabulary::statistics_body<T, aligned>(logits, labels, statistics, count, classes, stride, first_class, size);              \
  }
STATISTICS(ho_row_statistics_bf16, bf16, true)
STATISTICS(ho_row_statistics_fp32, float, true)
STATISTICS(ho_row_statistics_any_bf16, bf16, false)
STATISTICS(ho_row_statistics_any_fp32, float, false)

#define GRADIENT(name, T, aligned)                                                                                                       \
  HO_KERNEL(name, rows::kThreads)(T* __restrict__ logits, const int64_t* __restrict__ labels, const float* __restrict__ normalizer,     \
                                  const float* __restrict__ grad, int64_t count, int classes, int64_t stride, int64_t normalizer_stride, \
                                  int64_t first_class, int size, float z_loss) {                                             \
    vocabulary::gradient_body<T, aligned>(logits, labels, normalizer, grad, count, classes, stride, normalizer_stride, first_class,     \
                                          size, z_loss);                                                                                \
  }
GRADIENT(ho_overwrite_with_gradient_bf16, bf16, true)
GRADIENT(ho_overwrite_with_gradient_fp32, float, true)
GRADIENT(ho_overwrite_with_gradient_any_bf16, bf16, false)
GRADIENT(ho_overwrite_with_gradient_any_fp32, float, false)

// Launchers. element_bytes 2 (bf16) or 4 (fp32); aligned: all rows start and end at multiples of 16 bytes; size: classes of a part, a multiple
// of 16; blocks of four waves for each part, which loop over rows.
HO_EXPORT int ho_row_statistics(const void* logits, const void* labels, void* statistics, int64_t count, int64_t classes, int64_t stride,
                                int64_t first_class, int64_t parts, int64_t size, int64_t element_bytes, int64_t aligned, int64_t blocks,
                                void* stream) {
  if ((element_bytes != 2 && element_bytes != 4) || classes > INT32_MAX || size > INT32_MAX) return -1;
  const dim3 grid{unsigned(blocks), unsigned(parts)}, block(rows::kThreads);
  const int64_t* const ids = static_cast<const int64_t*>(labels);
  float* const out = static_cast<float*>(statistics);
  if (element_bytes == 2)
    return ho_launch(aligned ? ho_row_statistics_bf16 : ho_row_statistics_any_bf16, grid, block, stream, static_cast<const bf16*>(logits), ids,
                     out, count, int(classes), stride, first_class, int(size));
  return ho_launch(aligned ? ho_row_statistics_fp32 : ho_row_statistics_any_fp32, grid, block, stream, static_cast<const float*>(logits), ids,
                   out, count, int(classes), stride, first_class, int(size));
}

HO_EXPORT int ho_overwrite_with_gradient(void* logits, const void* labels, const void* normalizer, const void* grad, int64_t count,
                                         int64_t classes, int64_t stride, int64_t normalizer_stride, int64_t first_class, int64_t parts,
                                         int64_t size, float z_loss, int64_t element_bytes, int64_t aligned, int64_t blocks, void* stream) {
  if ((element_bytes != 2 && element_bytes != 4) || classes > INT32_MAX || size > INT32_MAX) return -1;
  const dim3 grid{unsigned(blocks), unsigned(parts)}, block(rows::kThreads);
  const int64_t* const ids = static_cast<const int64_t*>(labels);
  const float *const norm = static_cast<const float*>(normalizer), *const upstream = static_cast<const float*>(grad);
  if (element_bytes == 2)
    return ho_launch(aligned ? ho_overwrite_with_gradient_bf16 : ho_overwrite_with_gradient_any_bf16, grid, block, stream,
                     static_cast<bf16*>(logits), ids, norm, upstream, count, int(classes), stride, normalizer_stride, first_class, int(size),
                     z_loss);
  return ho_launch(aligned ? ho_overwrite_with_gradient_fp32 : ho_overwrite_with_gradient_any_fp32, grid, block, stream,
                   static_cast<float*>(logits), ids, norm, upstream, count, int(classes), stride, normalizer_stride, first_class, int(size),
                   z_loss);
}
