// SPDX-License-Identifier: Apache-2.0
// Residual merge + RMSNorm (arXiv 1910.07467) or LayerNorm (arXiv 1607.06450), forward. Plain: new_residual = x + residual. ZAYA:
// new_residual = (x + x_bias) x_scale + (residual + residual_bias) residual_scale. Then, of new_residual as stored, with c = new_residual -
// mean in LayerNorm (kCentered) and c = new_residual in RMSNorm, y = c * rstd * weight (+ bias), rstd = 1 / sqrt(mean(c^2) + eps).
#include "rms_norm_any.h"

template <class L, class X, class R, class W, bool kScaled, bool kCentered>
__device__ __forceinline__ void forward_rows(
    const X* x, const R* residual, const W* x_bias, const W* x_scale, const W* residual_bias, const W* residual_scale,
    const W* weight, W* y, R* new_residual, float* rstd, int64_t rows, int64_t x_stride, int64_t residual_stride, float eps,
    const W* bias = nullptr, float* mean_of_row = nullptr) {
  HO_LDS(float, slots, kSlots<L::kThreads>);
  float w[kLaneElements], b[kLaneElements], s_x[kLaneElements], s_r[kLaneElements], shift[kLaneElements];
  // LayerNorm keeps both as bf16 and converts them in every row: with sixteen floats fewer waves fit.
  typename L::template Raw<W> raw_w{}, raw_b{};
  if constexpr (kCentered) raw_w = L::load(weight), raw_b = L::load(bias);
  else L::load_values(weight, w);
  if constexpr (kScaled) {
    float b_x[kLaneElements], b_r[kLaneElements];
    L::load_values(x_scale, s_x), L::load_values(residual_scale, s_r);
    L::load_values(x_bias, b_x), L::load_values(residual_bias, b_r);
#pragma unroll
    for (int k = 0; k < kLaneElements; ++k) shift[k] = merge_shift(b_x[k], s_x[k], b_r[k], s_r[k]);
  }
  const int64_t step = int64_t(gridDim.x) * L::kRows;
  int64_t first = int64_t(blockIdx.x) * L::kRows, row = first + L::group();
  typename L::template Raw<X> raw_x{};
  typename L::template Raw<R> raw_r{};
  if (row < rows) raw_x = L::load_once(x + row * x_stride), raw_r = L::load_once(residual + row * residual_stride);
  for (int parity = 0; first < rows; first += step, row += step, parity ^= 1) {  // `first` is the same in a block, so all threads reach the barrier
    float a[kLaneElements], value[kLaneElements], squares = 0.0f, sum = 0.0f;
    L::values(raw_x, a), L::values(raw_r, value);
    if (row + step < rows) raw_x = L::load_once(x + (row + step) * x_stride), raw_r = L::load_once(residual + (row + step) * residual_stride);
#pragma unroll
    for (int k = 0; k < kLaneElements; ++k) {
      const float merged = kScaled ? merge(a[k], s_x[k], value[k], s_r[k], shift[k]) : a[k] + value[k];
      value[k] = as_stored<R>(merged);
      if constexpr (kCentered) sum += value[k];
      else squares = fmaf(value[k], value[k], squares);
    }
    if (row < rows) L::store(new_residual + row * L::kHidden, value);
    if constexpr (kCentered) {
      const float center = row_sum<L::kRowThreads, L::kThreads>(sum, slots, 0) * (1.0f / L::kHidden);
#pragma unroll
      for (int k = 0; k < kLaneElements; ++k) value[k] -= center, squares = fmaf(value[k], value[k], squares);
      if (row < rows && L::thread() == 0) mean_of_row[row] = center;
    }
    const float mean = row_sum<L::kRowThreads, L::kThreads>(squares, slots, kCentered ? 1 : parity) * (1.0f / L::kHidden);
    const float scale = rsqrtf(mean + eps);
    if (row < rows) {
      if (L::thread() == 0) rstd[row] = scale;
      if constexpr (kCentered) L::forget(raw_w), L::forget(raw_b), L::values(raw_w, w), L::values(raw_b, b);
#pragma unroll
      for (int k = 0; k < kLaneElements; ++k) value[k] = kCentered ? fmaf(value[k] * scale, w[k], b[k]) : value[k] * scale * w[k];
      L::store(y + row * L::kHidden, value);
    }
  }
}

// RMSNorm's kernels have no parameters for LayerNorm's bias and mean.
#define PARAMETERS_rms_norm
#define PARAMETERS_layer_norm , const bf16* bias, float* mean
#define ARGUMENTS_rms_norm
#define ARGUMENTS_layer_norm , bias, mean
#define FORWARD(name, norm, hidden, R, kScaled, kCentered)                                                                          \
  HO_KERNEL(name, (Layout<hidden, bf16, R>::kThreads))                                                                              \
  (const bf16* x, const R* residual, const bf16* x_bias, const bf16* x_scale, const bf16* residual_bias, const bf16* residual_scale, \
   const bf16* weight, bf16* y, R* new_residual, float* rstd, int64_t rows, int64_t x_stride, int64_t residual_stride,              \
   float eps PARAMETERS_##norm) {                                                                                                   \
    forward_rows<Layout<hidden, bf16, R>, bf16, R, bf16, kScaled, kCentered>(x, residual, x_bias, x_scale, residual_bias,           \
                                                                             residual_scale, weight, y, new_residual, rstd, rows,   \
                                                                             x_stride, residual_stride, eps ARGUMENTS_##norm);      \
  }
#define FORWARD_FORMS(norm, hidden, kCentered)                                                  \
  FORWARD(ho_add_##norm##_##hidden, norm, hidden, bf16, false, kCentered)                       \
  FORWARD(ho_scaled_residual_##norm##_##hidden, norm, hidden, float, true, kCentered)
#define RMS_NORM_ROW(hidden, ...) FORWARD_FORMS(rms_norm, hidden, false)
#define LAYER_NORM_ROW(hidden, ...) FORWARD_FORMS(layer_norm, hidden, true)
HO_RMS_NORM_TABLE(RMS_NORM_ROW)
HO_LAYER_NORM_TABLE(LAYER_NORM_ROW)

// All forms: without x_scale the plain one, without bias RMSNorm.
HO_KERNEL(ho_rms_norm_any, kGenericThreads)
(const void* x, const void* residual, const void* x_bias, const void* x_scale, const void* residual_bias, const void* residual_scale,
 const void* weight, void* y, void* new_residual, float* rstd, int64_t rows, int64_t x_stride, int64_t residual_stride, float eps,
 int hidden, int64_t types, const void* bias, float* mean_of_row) {
  const bool scaled = x_scale != nullptr, centered = bias != nullptr;
  HO_LDS(float, slots, kSlots<kGenericThreads>);
  const bool aligned = types & kAligned, vectors = types & kBf16Weight;
  const AnyRow of_x{x, (types & kBf16X) != 0, aligned}, of_r{residual, (types & kBf16Residual) != 0, aligned};
  const AnyRow stored{new_residual, of_r.is_bf16, aligned}, of_y{y, vectors, aligned}, of_w{weight, vectors, aligned};
  int parity = 0;
  for (int64_t row = blockIdx.x; row < rows; row += gridDim.x, parity ^= 1) {
    float squares = 0.0f, sum = 0.0f, center = 0.0f;
    for (int column = int(threadIdx.x) * kLaneElements; column < hidden; column += kGenericThreads * kLaneElements) {
      const int count = columns_of_lane(column, hidden);
      float a[kLaneElements], value[kLaneElements];
      of_x.load(row * x_stride + column, count, a), of_r.load(row * residual_stride + column, count, value);
      if (scaled) {
        float b_x[kLaneElements], s_x[kLaneElements], b_r[kLaneElements], s_r[kLaneElements];
        AnyRow{x_bias, vectors, aligned}.load(column, count, b_x), AnyRow{x_scale, vectors, aligned}.load(column, count, s_x);
        AnyRow{residual_bias, vectors, aligned}.load(column, count, b_r), AnyRow{residual_scale, vectors, aligned}.load(column, count, s_r);
#pragma unroll
        for (int k = 0; k < kLaneElements; ++k) value[k] = merge(a[k], s_x[k], value[k], s_r[k], merge_shift(b_x[k], s_x[k], b_r[k], s_r[k]));
      } else {
#pragma unroll
        for (int k = 0; k < kLaneElements; ++k) value[k] += a[k];
      }
      stored.store(row * hidden + column, count, value);
#pragma unroll
      for (int k = 0; k < kLaneElements; ++k) {
        if (centered) sum += value[k];
        else squares = fmaf(value[k], value[k], squares);
      }
    }
    if (centered) {
      center = row_sum<kGenericThreads, kGenericThreads>(sum, slots, 0) / float(hidden);
      if (threadIdx.x == 0) mean_of_row[row] = center;
      for (int column = int(threadIdx.x) * kLaneElements; column < hidden; column += kGenericThreads * kLaneElements) {
        const int count = columns_of_lane(column, hidden);
        float value[kLaneElements];
        stored.load(row * hidden + column, count, value);
#pragma unroll
        for (int k = 0; k < kLaneElements; ++k) {
          if (k < count) squares = fmaf(value[k] - center, value[k] - center, squares);
        }
      }
    }
    const float scale = rsqrtf(row_sum<kGenericThreads, kGenericThreads>(squares, slots, centered ? 1 : parity) / float(hidden) + eps);
    if (threadIdx.x == 0) rstd[row] = scale;
    for (int column = int(threadIdx.x) * kLaneElements; column < hidden; column += kGenericThreads * kLaneElements) {
      const int count = columns_of_lane(column, hidden);
      float value[kLaneElements], w[kLaneElements];
      stored.load(row * hidden + column, count, value), of_w.load(column, count, w);  // stored by the same thread
      if (centered) {
        float b[kLaneElements];
        AnyRow{bias, vectors, aligned}.load(column, count, b);
#pragma unroll
        for (int k = 0; k < kLaneElements; ++k) value[k] = fmaf((value[k] - center) * scale, w[k], b[k]);
      } else {
#pragma unroll
        for (int k = 0; k < kLaneElements; ++k) value[k] = value[k] * scale * w[k];
      }
      of_y.store(row * hidden + column, count, value);
    }
  }
}

// Null merge vectors select the plain form, a null bias RMSNorm, which writes no mean. `types`: kBf16X | kBf16Residual | kBf16Weight |
// kAligned. The strides are in elements; y and new_residual are contiguous. `processors`: compute units of the device.
HO_EXPORT int ho_rms_norm_forward(const void* x, const void* residual, const void* x_bias, const void* x_scale, const void* residual_bias,
                                  const void* residual_scale, const void* weight, const void* bias, void* y, void* new_residual,
                                  void* mean, void* rstd, int64_t rows, int64_t hidden, int64_t x_stride, int64_t residual_stride,
                                  int64_t types, int64_t processors, double eps, void* stream) {
  const bool scaled = x_scale != nullptr;
  if (hidden < 1 || hidden > INT32_MAX) return -1;
  if (has_fast_kernel(types, scaled)) {
#define LAUNCH(kernel, H, R, most, ...)                                                                                           \
  return ho_launch(kernel, dim3(unsigned(blocks_for(rows, Layout<H, bf16, R>::kRows, processors * most))),                        \
                   dim3(Layout<H, bf16, R>::kThreads), stream, static_cast<const bf16*>(x), static_cast<const R*>(residual),      \
                   static_cast<const bf16*>(x_bias), static_cast<const bf16*>(x_scale), static_cast<const bf16*>(residual_bias),  \
                   static_cast<const bf16*>(residual_scale), static_cast<const bf16*>(weight), static_cast<bf16*>(y),             \
                   static_cast<R*>(new_residual), static_cast<float*>(rstd), rows, x_stride, residual_stride, float(eps) __VA_ARGS__)
#define LAUNCH_FORM(norm, H, most, scaled_most, ...)                                                        \
  if (scaled) LAUNCH(ho_scaled_residual_##norm##_##H, H, float, scaled_most, __VA_ARGS__);                  \
  LAUNCH(ho_add_##norm##_##H, H, bf16, most, __VA_ARGS__);
#define LAYER_NORM_CASE(H, most, scaled_most, ...) \
  case H: LAUNCH_FORM(layer_norm, H, most, scaled_most, , static_cast<const bf16*>(bias), static_cast<float*>(mean))
#define RMS_NORM_CASE(H, most, scaled_most, ...) \
  case H: LAUNCH_FORM(rms_norm, H, most, scaled_most, )
    if (bias) switch (hidden) { HO_LAYER_NORM_TABLE(LAYER_NORM_CASE) }
    else switch (hidden) { HO_RMS_NORM_TABLE(RMS_NORM_CASE) }
  }
  return ho_launch(ho_rms_norm_any, dim3(unsigned(blocks_for(rows, 1, processors * kGenericBlocks))), dim3(kGenericThreads), stream, x,
                   residual, x_bias, x_scale, residual_bias, residual_scale, weight, y, new_residual, static_cast<float*>(rstd), rows,
                   x_stride, residual_stride, float(eps), int(hidden), types, bias, static_cast<float*>(mean));
}
