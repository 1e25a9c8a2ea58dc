// SPDX-License-Identifier: Apache-2.0
// Overwrites logits with exponentials and sums them, in one pass with a wave per part of a row (part blockIdx.y); and turns them into gradients,
// with a wave per row.
// Conventions: reference.py. Arithmetic is fp32, each result rounded once.
#include "vocabulary.h"

namespace vocabulary {

constexpr float kMost = 40.0f, kPeriod = 80.0f, kLarge = 16777216.0f;  // MOST, PERIOD and LARGE of the reference
constexpr int kLargestPart = 2048;                // classes

// Hides `raw` from the compiler, so that it converts or compares again instead of keeping the results in registers.
template <class V>
__device__ __forceinline__ void forget(V& raw) {
#if HO_HIP
  asm volatile("" : "+v"(raw));
#endif
}

// Keeps a part in the wave's registers between its maximum and its exponentials.
template <class T, bool kAligned>
__device__ __forceinline__ void exponentials_body(T* __restrict__ logits, const int64_t* __restrict__ labels, float* __restrict__ statistics,
                                                  int64_t count, int classes, int64_t stride, int64_t first_class, int size) {
  constexpr int kWidth = kWidthOf<T, kAligned>, kStep = kWave * kWidth, kPieces = kLargestPart / kStep;
  const Part part = this_part(size, classes);
  const int length = part.end - part.start;
  int mine = lane_id() * kWidth;
  for (int64_t row = first_row(); row < count; row += row_step()) {
    T* const values = logits + row * stride + part.start;
    Lane<T, kWidth> x[kPieces];
#pragma unroll
    for (int p = 0; p < kPieces; ++p) {
      if (mine + p * kStep < length) x[p].read(values + mine + p * kStep);
      else
#pragma unroll
        for (int i = 0; i < kWidth; ++i) x[p].set(i, rounded<T>(kNothing));
    }
    const int64_t label = load_global(labels + row) - first_class;
    const bool here = label >= part.start && label < part.end;
    const float of_label = here ? to_float(load_global(values + (label - part.start))) : 0.0f;
    float top = kNothing;
#pragma unroll
    for (int p = 0; p < kPieces; ++p)
#pragma unroll
      for (int i = 0; i < kWidth; ++i) top = fmaxf(top, to_float(x[p].get(i)));
    // Lanes store only after this point, when all have read their logits, the label's too.
    top = wave_max(top);
    const float reference = fabsf(top) < kLarge ? ceilf((top - kMost) * (1.0f / kPeriod)) * kPeriod : top, shift = shift_of(reference);
    float total = 0.0f;
    forget(mine);  // masks of 64 comparisons would not fit into the scalar registers
#pragma unroll
    for (int p = 0; p < kPieces; ++p)
      if (mine + p * kStep < length) {
        forget(x[p].v);
#pragma unroll
        for (int i = 0; i < kWidth; ++i) {
          const float e = exponential(to_float(x[p].get(i)) - shift);
          total += e;
          x[p].set(i, rounded<T>(e));
        }
        x[p].write(values + mine + p * kStep);
      }
    total = wave_sum(total);
    if (lane_id() == 0) {
      float* const to = statistics + int64_t(blockIdx.y) * 3 * count + row;
      store_global(to, reference);
      store_global(to + count, total);
      store_global(to + 2 * count, of_label);
    }
  }
}

template <class T, int kWidth>
struct ScaleWork {
  T* values;
  float scale;

  template <int kNow> __device__ __forceinline__ void run(int at) {
    constexpr int kStep = kWave * kWidth;
    Lane<T, kWidth> x[kNow];
#pragma unroll
    for (int p = 0; p < kNow; ++p) x[p].read(values + at + p * kStep);
#pragma unroll
    for (int p = 0; p < kNow; ++p) {
      forget(x[p].v);  // converts one access after the other
#pragma unroll
      for (int i = 0; i < kWidth; ++i) x[p].set(i, rounded<T>(to_float(x[p].get(i)) * scale));
      forget(x[p].v);
      x[p].write(values + at + p * kStep);
    }
  }
};

// This rank's parts start at first_part and cover its classes.
struct Parts {
  int size, all, first, mine;
};

template <class T, bool kAligned>
__device__ __forceinline__ void finish_body(T* __restrict__ exponentials, const int64_t* __restrict__ labels, const float* __restrict__ statistics,
                                            const float* __restrict__ grad, float* __restrict__ found, int64_t count, int classes, int64_t stride,
                                            int64_t first_class, Parts parts, float z_loss) {
  constexpr int kWidth = kWidthOf<T, kAligned>, kPieces = 4;
  const int lane = lane_id();
  for (int64_t row = first_row(); row < count; row += row_step()) {
    const float* const of_row = statistics + row;
    float largest = kNothing;
    for (int p = lane; p < parts.all; p += kWave) largest = fmaxf(largest, load_global(of_row + int64_t(p) * 3 * count));
    const float shift = shift_of(wave_max(largest));
    float total = 0.0f, label_logit = 0.0f, moved = 0.0f;
    for (int p = lane; p < parts.all; p += kWave) {
      const float* const at = of_row + int64_t(p) * 3 * count;
      const float reference = load_global(at);
      total += load_global(at + count) * exponential(reference - shift);
      label_logit += load_global(at + 2 * count);
      if (p >= parts.first && p < parts.first + parts.mine && reference != shift) moved = 1.0f;
    }
    total = wave_sum(total);
    label_logit = wave_sum(label_logit) - shift;
    const float of_label = exponential(label_logit), log_total = logf(total);
    // Where the label has most of the sum, a difference of logarithms would lose the remainder.
    const bool most = of_label > 0.5f * total && of_label < 2.0f * total;
    const float log_sum = shift + log_total, factor = fmaf(2.0f * z_loss, log_sum, 1.0f);
    const float loss = most ? logf(total / of_label) : log_total - label_logit;
    T* const values = exponentials + row * stride;
    if (wave_sum(moved) > 0.0f)  // rare
      for (int p = 0; p < parts.mine; ++p) {
        const float reference = load_global(of_row + int64_t(parts.first + p) * 3 * count);
        const int start = min_of(p * parts.size, classes), end = min_of(start + parts.size, classes);
        if (reference == shift) continue;
        ScaleWork<T, kWidth> work{values + start, exponential(reference - shift)};
        for_each_piece<kPieces, kWidth>(end - start, work);
      }
    const int64_t label = load_global(labels + row) - first_class;
    if (label >= 0 && label < classes && lane == label_lane<kWidth>(int(label), parts.size)) store_global(values + label, rounded<T>(of_label - total / factor));
    if (lane == 0) {
      store_global(found + row, fmaf(z_loss * log_sum, log_sum, loss));
      store_global(found + count + row, load_global(grad + row) * factor / total);
    }
  }
}

}  // namespace vocabulary

#define EXPONENTIALS(name, T, aligned)                                                                                                   \
  HO_KERNEL(name, rows::kThreads)(T* __restrict__ logits, const int64_t* __restrict__ labels, float* __restrict__ statistics,           \
                                  int64_t count, int classes, int64_t stride, int64_t first_class, int size) {               \
    vocabulary::exponentials_body<T, aligned>(logits, labels, statistics, count, classes, stride, first_class, size);            \
  }
EXPONENTIALS(ho_overwrite_with_exponentials_bf16, bf16, true)
EXPONENTIALS(ho_overwrite_with_exponentials_fp32, float, true)
EXPONENTIALS(ho_overwrite_with_exponentials_any_bf16, bf16, false)
EXPONENTIALS(ho_overwrite_with_exponentials_any_fp32, float, false)

#define FINISH(name, T, aligned)                                                                                                         \
  HO_KERNEL(name, rows::kThreads)(T* __restrict__ exponentials, const int64_t* __restrict__ labels,                                     \
                                  const float* __restrict__ statistics, const float* __restrict__ grad, float* __restrict__ found,      \
                                  int64_t count, int classes, int64_t stride, int64_t first_class, int size, int all_parts,  \
                                  int first_part, int parts, float z_loss) {                                                            \
    vocabulary::finish_body<T, aligned>(exponentials, labels, statistics, grad, found, count, classes, stride, first_class,      \
                                        {size, all_parts, first_part, parts}, z_loss);                                                  \
  }
FINISH(ho_finish_gradient_bf16, bf16, true)
FINISH(ho_finish_gradient_fp32, float, true)
FINISH(ho_finish_gradient_any_bf16, bf16, false)
FINISH(ho_finish_gradient_any_fp32, float, false)

// Launchers. element_bytes 2 (bf16) or 4 (fp32); aligned: all rows start and end at multiples of 16 bytes; size: classes of a part, a multiple
// of 16 and at most 2048; blocks of four waves for each part, which loop over rows.
HO_EXPORT int ho_overwrite_with_exponentials(void* logits, const void* labels, void* statistics, int64_t count, int64_t classes, int64_t stride,
                                             int64_t first_class, int64_t parts, int64_t size, int64_t element_bytes, int64_t aligned,
                                             int64_t blocks, void* stream) {
  if ((element_bytes != 2 && element_bytes != 4) || classes > INT32_MAX || size > vocabulary::kLargestPart) return -1;
  const dim3 grid{unsigned(blocks), unsigned(parts)}, block(rows::kThreads);
  const int64_t* const ids = static_cast<const int64_t*>(labels);
  float* const out = static_cast<float*>(statistics);
  if (element_bytes == 2)
    return ho_launch(aligned ? ho_overwrite_with_exponentials_bf16 : ho_overwrite_with_exponentials_any_bf16, grid, block, stream,
                     static_cast<bf16*>(logits), ids, out, count, int(classes), stride, first_class, int(size));
  return ho_launch(aligned ? ho_overwrite_with_exponentials_fp32 : ho_overwrite_with_exponentials_any_fp32, grid, block, stream,
                   static_cast<float*>(logits), ids, out, count, int(classes), stride, first_class, int(size));
}

HO_EXPORT int ho_finish_gradient(void* exponentials, const void* labels, const void* statistics, const void* grad, void* found, int64_t count,
                                 int64_t classes, int64_t stride, int64_t first_class, int64_t size, int64_t all_parts, int64_t first_part,
                                 int64_t parts, float z_loss, int64_t element_bytes, int64_t aligned, int64_t blocks, void* stream) {
  if ((element_bytes != 2 && element_bytes != 4) || classes > INT32_MAX || size * parts > INT32_MAX || all_parts > INT32_MAX) return -1;
  const dim3 grid{unsigned(blocks)}, block(rows::kThreads);
  const int64_t* const ids = static_cast<const int64_t*>(labels);
  const float *const sums = static_cast<const float*>(statistics), *const upstream = static_cast<const float*>(grad);
  float* const out = static_cast<float*>(found);
  if (element_bytes == 2)
    return ho_launch(aligned ? ho_finish_gradient_bf16 : ho_finish_gradient_any_bf16, grid, block, stream, static_cast<bf16*>(exponentials), ids,
                     sums, upstream, out, count, int(classes), stride, first_class, int(size), int(all_parts), int(first_part), int(parts),
                     z_loss);
  return ho_launch(aligned ? ho_finish_gradient_fp32 : ho_finish_gradient_any_fp32, grid, block, stream, static_cast<float*>(exponentials), ids,
                   sums, upstream, out, count, int(classes), stride, first_class, int(size), int(all_parts), int(first_part), int(parts),
                   z_loss);
}
