// SPDX-License-Identifier: Apache-2.0
// Gradients of residual merge + RMSNorm or LayerNorm (kCentered). With n = new_residual * rstd, or (new_residual - mean) * rstd,
// p = mean(dy * weight * n) over the row, m = mean(dy * weight) in LayerNorm and 0 in RMSNorm, and d the gradient of new_residual from above,
//     g = (dy * weight - n * p - m) * rstd + d       gradient of new_residual as a whole
//     plain: d_x = d_residual = g                    ZAYA: d_x = g x_scale, d_residual = g residual_scale
// and over all rows sum g, sum g x, sum g residual and sum dy n, from which the gradients of all vectors follow:
//     d_x_bias = x_scale sum g,  d_x_scale = sum g x + x_bias sum g,  likewise of the residual,  d_weight = sum dy n,  d_bias = sum dy.
// Two launches: blocks loop over rows and write their sums as partial [blocks][kSumsOf][hidden]; the second launch adds these in a fixed
// order. No atomics. ZAYA's form merges new_residual again instead of reading it, because x and residual are read anyway.
#include "rms_norm_any.h"

__device__ __forceinline__ void add_products(float (&sum)[kLaneElements], const float (&a)[kLaneElements], const float (&b)[kLaneElements]) {
#pragma unroll
  for (int k = 0; k < kLaneElements; ++k) sum[k] = fmaf(a[k], b[k], sum[k]);
}

template <class L> __device__ __forceinline__ void store_floats(float* out, const float (&sum)[kLaneElements]) {
#pragma unroll
  for (int k = 0; k < kLaneElements; k += 4) {
    const f32x4 four = {sum[k], sum[k + 1], sum[k + 2], sum[k + 3]};
    *reinterpret_cast<f32x4*>(out + L::column(k / L::kWidth) + k % L::kWidth) = four;
  }
}

// Writes the block's sum of each column to `out`; the rows of a block are added in their order.
template <class L> __device__ __forceinline__ void store_block_sum(const float (&sum)[kLaneElements], float* out, float* scratch) {
  if constexpr (L::kRows == 1) {
    store_floats<L>(out, sum);
  } else {
    store_floats<L>(scratch + L::group() * L::kHidden, sum);
    block_sync_lds();
    for (int column = int(threadIdx.x); column < L::kHidden; column += L::kThreads) {
      float total = 0.0f;
#pragma unroll
      for (int group = 0; group < L::kRows; ++group) total += scratch[group * L::kHidden + column];
      out[column] = total;
    }
    block_sync_lds();
  }
}

// Plain form: `residual` is new_residual, x and the merge vectors are null.
template <class L, class X, class R, class W, bool kScaled, bool kCentered>
__device__ __forceinline__ void backward_rows(
    const W* dy, const R* d_new_residual, const X* x, const R* residual, const float* rstd, const W* x_bias, const W* x_scale,
    const W* residual_bias, const W* residual_scale, const W* weight, X* d_x, R* d_residual, float* partial, int64_t rows,
    int64_t dy_stride, int64_t d_new_residual_stride, int64_t x_stride, int64_t residual_stride, const float* mean = nullptr) {
  HO_LDS(float, slots, kSlots<L::kThreads>);
  constexpr bool kPrefetch = !kScaled || L::kThreads < 1024;  // otherwise two rows do not fit into the registers
  float w[kLaneElements], s_x[kLaneElements], s_r[kLaneElements], shift[kLaneElements];
  float sum_g[kLaneElements] = {}, sum_gx[kLaneElements] = {}, sum_gr[kLaneElements] = {}, sum_w[kLaneElements] = {}, sum_b[kLaneElements] = {};
  L::load_values(weight, w);
  if constexpr (kScaled) {
    float b_x[kLaneElements], b_r[kLaneElements];
    L::load_values(x_scale, s_x), L::load_values(residual_scale, s_r);
    L::load_values(x_bias, b_x), L::load_values(residual_bias, b_r);
#pragma unroll
    for (int k = 0; k < kLaneElements; ++k) shift[k] = merge_shift(b_x[k], s_x[k], b_r[k], s_r[k]);
  }
  const int64_t step = int64_t(gridDim.x) * L::kRows;
  int64_t first = int64_t(blockIdx.x) * L::kRows, row = first + L::group();
  typename L::template Raw<W> raw_dy{};
  typename L::template Raw<R> raw_d{}, raw_r{};
  typename L::template Raw<X> raw_x{};
  float scale = 0.0f, center = 0.0f;
  const auto load = [&](int64_t at) {
    raw_dy = L::load_once(dy + at * dy_stride), raw_r = L::load_once(residual + at * residual_stride);
    if constexpr (kScaled) raw_x = L::load_once(x + at * x_stride);
    if (d_new_residual) raw_d = L::load_once(d_new_residual + at * d_new_residual_stride);
    scale = L::load_row_value(rstd + at);
    if constexpr (kCentered) center = L::load_row_value(mean + at);
  };
  if (kPrefetch && row < rows) load(row);
  for (int parity = 0; first < rows; first += step, row += step, parity ^= 1) {
    if (!kPrefetch && row < rows) load(row);
    const float of_row = row < rows ? L::row_value(scale) : 0.0f, middle = kCentered && row < rows ? L::row_value(center) : 0.0f;
    float upstream[kLaneElements], a[kLaneElements], r[kLaneElements], n[kLaneElements], products = 0.0f, sum = 0.0f;
    const auto derive = [&] {
      L::values(raw_dy, upstream), L::values(raw_r, r);
      if constexpr (kScaled) L::values(raw_x, a);
#pragma unroll
      for (int k = 0; k < kLaneElements; ++k) {
        const float value = kScaled ? as_stored<R>(merge(a[k], s_x[k], r[k], s_r[k], shift[k])) : r[k];
        n[k] = (kCentered ? value - middle : value) * of_row;
      }
    };
    derive();
    float g[kLaneElements];
    L::values(raw_d, g);
    if (kPrefetch && row + step < rows) load(row + step);
#pragma unroll
    for (int k = 0; k < kLaneElements; ++k) {
      products = fmaf(upstream[k] * w[k], n[k], products);
      if constexpr (kCentered) sum = fmaf(upstream[k], w[k], sum);
    }
    const float projection = row_sum<L::kRowThreads, L::kThreads>(products, slots, kCentered ? 1 : parity) * (1.0f / L::kHidden);
    float average = 0.0f;
    if constexpr (kCentered) average = row_sum<L::kRowThreads, L::kThreads>(sum, slots, 0) * (1.0f / L::kHidden);
    if constexpr (!kPrefetch) L::forget(raw_dy), L::forget(raw_r), L::forget(raw_x), derive();
    if (row < rows) {
#pragma unroll
      for (int k = 0; k < kLaneElements; ++k) {
        const float through = upstream[k] * w[k] - n[k] * projection;
        g[k] = fmaf(kCentered ? through - average : through, of_row, g[k]);
        if constexpr (kCentered) sum_b[k] += upstream[k];
      }
      add_products(sum_w, upstream, n);
      if constexpr (kScaled) {
        float out[kLaneElements];
        add_products(sum_gx, g, a), add_products(sum_gr, g, r);
#pragma unroll
        for (int k = 0; k < kLaneElements; ++k) sum_g[k] += g[k], out[k] = g[k] * s_x[k];
        L::store(d_x + row * L::kHidden, out);
#pragma unroll
        for (int k = 0; k < kLaneElements; ++k) out[k] = g[k] * s_r[k];
        L::store(d_residual + row * L::kHidden, out);
      } else {
        L::store(d_residual + row * L::kHidden, g);
      }
    }
  }
  HO_LDS(float, scratch, L::kRows == 1 ? 4 : L::kThreads * kLaneElements);
  float* out = partial + int64_t(blockIdx.x) * kSumsOf<kScaled, kCentered> * L::kHidden;
  if constexpr (kScaled) {
    store_block_sum<L>(sum_g, out, scratch);
    store_block_sum<L>(sum_gx, out + L::kHidden, scratch);
    store_block_sum<L>(sum_gr, out + 2 * L::kHidden, scratch);
    out += 3 * L::kHidden;
  }
  store_block_sum<L>(sum_w, out, scratch);
  if constexpr (kCentered) store_block_sum<L>(sum_b, out + L::kHidden, scratch);
}

// RMSNorm's kernels have no parameter for LayerNorm's mean.
#define PARAMETER_rms_norm
#define PARAMETER_layer_norm , const float* mean
#define ARGUMENT_rms_norm
#define ARGUMENT_layer_norm , mean
#define BACKWARD(name, norm, hidden, R, kScaled, kCentered)                                                                            \
  HO_KERNEL(name, (Layout<hidden, bf16, R>::kThreads))                                                                                 \
  (const bf16* dy, const R* d_new_residual, const bf16* x, const R* residual, const float* rstd, const bf16* x_bias, const bf16* x_scale, \
   const bf16* residual_bias, const bf16* residual_scale, const bf16* weight, bf16* d_x, R* d_residual, float* partial, int64_t rows,  \
   int64_t dy_stride, int64_t d_new_residual_stride, int64_t x_stride, int64_t residual_stride PARAMETER_##norm) {                     \
    backward_rows<Layout<hidden, bf16, R>, bf16, R, bf16, kScaled, kCentered>(                                                         \
        dy, d_new_residual, x, residual, rstd, x_bias, x_scale, residual_bias, residual_scale, weight, d_x, d_residual, partial, rows, \
        dy_stride, d_new_residual_stride, x_stride, residual_stride ARGUMENT_##norm);                                                  \
  }
#define BACKWARD_FORMS(norm, hidden, kCentered)                                                      \
  BACKWARD(ho_add_##norm##_backward_##hidden, norm, hidden, bf16, false, kCentered)                  \
  BACKWARD(ho_scaled_residual_##norm##_backward_##hidden, norm, hidden, float, true, kCentered)
#define RMS_NORM_ROW(hidden, ...) BACKWARD_FORMS(rms_norm, hidden, false)
#define LAYER_NORM_ROW(hidden, ...) BACKWARD_FORMS(layer_norm, hidden, true)
HO_RMS_NORM_TABLE(RMS_NORM_ROW)
HO_LAYER_NORM_TABLE(LAYER_NORM_ROW)

// One row after the other; each lane keeps its columns' sums in its own elements of `partial`.
// All forms: without x_scale the plain one, without mean RMSNorm.
HO_KERNEL(ho_rms_norm_backward_any, kGenericThreads)
(const void* dy, const void* d_new_residual, const void* x, const void* residual, const float* rstd, const void* x_bias,
 const void* x_scale, const void* residual_bias, const void* residual_scale, const void* weight, void* d_x, void* d_residual, float* partial,
 int64_t rows, int64_t dy_stride, int64_t d_new_residual_stride, int64_t x_stride, int64_t residual_stride, int hidden, int64_t types,
 const float* mean) {
  const bool scaled = x_scale != nullptr, centered = mean != nullptr;
  HO_LDS(float, slots, kSlots<kGenericThreads>);
  const int count_of_sums = (scaled ? 4 : 1) + centered;
  constexpr int kStep = kGenericThreads * kLaneElements;
  const bool aligned = types & kAligned, vectors = types & kBf16Weight, bf16_x = types & kBf16X, bf16_r = types & kBf16Residual;
  const auto vector = [&](const void* of, int column, int count, float (&v)[kLaneElements]) { AnyRow{of, vectors, aligned}.load(column, count, v); };
  partial += int64_t(blockIdx.x) * count_of_sums * hidden;
  const AnyRow sums{partial, false, aligned};
  for (int column = int(threadIdx.x) * kLaneElements; column < hidden; column += kStep) {
    float zero[kLaneElements] = {};
    for (int sum = 0; sum < count_of_sums; ++sum) sums.store(int64_t(sum) * hidden + column, columns_of_lane(column, hidden), zero);
  }
  int parity = 0;
  for (int64_t row = blockIdx.x; row < rows; row += gridDim.x, parity ^= 1) {
    const float scale = rstd[row], middle = centered ? mean[row] : 0.0f;
    float upstream[kLaneElements], a[kLaneElements], r[kLaneElements], w[kLaneElements], n[kLaneElements], s_x[kLaneElements], s_r[kLaneElements];
    const auto read = [&](int column, int count) {
      AnyRow{dy, vectors, aligned}.load(row * dy_stride + column, count, upstream);
      AnyRow{residual, bf16_r, aligned}.load(row * residual_stride + column, count, r);
      vector(weight, column, count, w);
      if (scaled) {
        float b_x[kLaneElements], b_r[kLaneElements];
        AnyRow{x, bf16_x, aligned}.load(row * x_stride + column, count, a);
        vector(x_bias, column, count, b_x), vector(x_scale, column, count, s_x);
        vector(residual_bias, column, count, b_r), vector(residual_scale, column, count, s_r);
#pragma unroll
        for (int k = 0; k < kLaneElements; ++k) {
          const float merged = merge(a[k], s_x[k], r[k], s_r[k], merge_shift(b_x[k], s_x[k], b_r[k], s_r[k]));
          n[k] = bf16_r ? as_stored<bf16>(merged) : merged;
        }
      } else {
#pragma unroll
        for (int k = 0; k < kLaneElements; ++k) n[k] = r[k];
      }
#pragma unroll
      for (int k = 0; k < kLaneElements; ++k) n[k] = (centered ? n[k] - middle : n[k]) * scale;
    };
    float products = 0.0f, sum = 0.0f;
    for (int column = int(threadIdx.x) * kLaneElements; column < hidden; column += kStep) {
      read(column, columns_of_lane(column, hidden));
#pragma unroll
      for (int k = 0; k < kLaneElements; ++k) {
        products = fmaf(upstream[k] * w[k], n[k], products);
        if (centered) sum = fmaf(upstream[k], w[k], sum);
      }
    }
    const float projection = row_sum<kGenericThreads, kGenericThreads>(products, slots, centered ? 1 : parity) / float(hidden);
    float average = 0.0f;
    if (centered) average = row_sum<kGenericThreads, kGenericThreads>(sum, slots, 0) / float(hidden);
    for (int column = int(threadIdx.x) * kLaneElements; column < hidden; column += kStep) {
      const int count = columns_of_lane(column, hidden);
      const int64_t at = row * hidden + column;
      float g[kLaneElements] = {}, out[kLaneElements];
      read(column, count);
      if (d_new_residual) AnyRow{d_new_residual, bf16_r, aligned}.load(row * d_new_residual_stride + column, count, g);
#pragma unroll
      for (int k = 0; k < kLaneElements; ++k) {
        const float through = upstream[k] * w[k] - n[k] * projection;
        g[k] = fmaf(centered ? through - average : through, scale, g[k]);
      }
      const float one[kLaneElements] = {1, 1, 1, 1, 1, 1, 1, 1};
      const auto add = [&](int sum, const float (&left)[kLaneElements], const float (&right)[kLaneElements]) {
        float so_far[kLaneElements];
        sums.load(int64_t(sum) * hidden + column, count, so_far);
        add_products(so_far, left, right);
        sums.store(int64_t(sum) * hidden + column, count, so_far);
      };
      add(scaled ? 3 : 0, upstream, n);
      if (centered) add(count_of_sums - 1, upstream, one);
      if (scaled) {
        add(0, g, one), add(1, g, a), add(2, g, r);
#pragma unroll
        for (int k = 0; k < kLaneElements; ++k) out[k] = g[k] * s_x[k];
        AnyRow{d_x, bf16_x, aligned}.store(at, count, out);
#pragma unroll
        for (int k = 0; k < kLaneElements; ++k) out[k] = g[k] * s_r[k];
        AnyRow{d_residual, bf16_r, aligned}.store(at, count, out);
      } else {
#pragma unroll
        for (int k = 0; k < kLaneElements; ++k) out[k] = g[k];
        AnyRow{d_residual, bf16_r, aligned}.store(at, count, out);
        if (bf16_x != bf16_r) AnyRow{d_x, bf16_x, aligned}.store(at, count, g);
      }
    }
  }
}

// The number of blocks of the row kernel, of RMSNorm and LayerNorm; partial has [kSumsOf][hidden] per block. 0 for no rows.
HO_EXPORT int64_t ho_rms_norm_backward_blocks(int64_t rows, int64_t hidden, int64_t types, int64_t scaled, int64_t centered,
                                              int64_t processors) {
  if (has_fast_kernel(types, scaled)) {
#define BLOCKS(H, forward, scaled_forward, most, scaled_most) \
  case H:                                                     \
    return blocks_for(rows, Layout<H, bf16, bf16>::kRows, processors * (scaled ? scaled_most : most));
    if (centered) switch (hidden) { HO_LAYER_NORM_TABLE(BLOCKS) }
    else switch (hidden) { HO_RMS_NORM_TABLE(BLOCKS) }
  }
  return blocks_for(rows, 1, processors * kGenericBlocks);
}

// First launch: d_x, d_residual and partial. Null merge vectors select the plain form: `residual` is new_residual, x is not read, and
// d_x is written only if its dtype differs. d_new_residual may be null. A null mean selects RMSNorm.
HO_EXPORT int ho_rms_norm_backward(const void* dy, const void* d_new_residual, const void* x, const void* residual, const void* mean,
                                   const void* rstd, const void* x_bias, const void* x_scale, const void* residual_bias,
                                   const void* residual_scale, const void* weight, void* d_x, void* d_residual, void* partial,
                                   int64_t rows, int64_t hidden, int64_t dy_stride, int64_t d_new_residual_stride, int64_t x_stride,
                                   int64_t residual_stride, int64_t types, int64_t blocks, void* stream) {
  const bool scaled = x_scale != nullptr;
  if (hidden < 1 || hidden > INT32_MAX) return -1;
  if (has_fast_kernel(types, scaled)) {
#define LAUNCH(kernel, H, R, ...)                                                                                                   \
  return ho_launch(kernel, dim3(unsigned(blocks)), dim3(Layout<H, bf16, R>::kThreads), stream, static_cast<const bf16*>(dy),        \
                   static_cast<const R*>(d_new_residual), static_cast<const bf16*>(x), static_cast<const R*>(residual),             \
                   static_cast<const float*>(rstd), static_cast<const bf16*>(x_bias), static_cast<const bf16*>(x_scale),            \
                   static_cast<const bf16*>(residual_bias), static_cast<const bf16*>(residual_scale), static_cast<const bf16*>(weight), \
                   static_cast<bf16*>(d_x), static_cast<R*>(d_residual), static_cast<float*>(partial), rows, dy_stride,             \
                   d_new_residual_stride, x_stride, residual_stride __VA_ARGS__)
#define LAUNCH_FORM(norm, H, ...)                                                                           \
  if (scaled) LAUNCH(ho_scaled_residual_##norm##_backward_##H, H, float, __VA_ARGS__);                      \
  LAUNCH(ho_add_##norm##_backward_##H, H, bf16, __VA_ARGS__);
#define LAYER_NORM_CASE(H, ...) \
  case H: LAUNCH_FORM(layer_norm, H, , static_cast<const float*>(mean))
#define RMS_NORM_CASE(H, ...) \
  case H: LAUNCH_FORM(rms_norm, H, )
    if (mean) switch (hidden) { HO_LAYER_NORM_TABLE(LAYER_NORM_CASE) }
    else switch (hidden) { HO_RMS_NORM_TABLE(RMS_NORM_CASE) }
  }
  return ho_launch(ho_rms_norm_backward_any, dim3(unsigned(blocks)), dim3(kGenericThreads), stream, dy, d_new_residual, x, residual,
                   static_cast<const float*>(rstd), x_bias, x_scale, residual_bias, residual_scale, weight, d_x, d_residual,
                   static_cast<float*>(partial), rows, dy_stride, d_new_residual_stride, x_stride, residual_stride, int(hidden), types,
                   static_cast<const float*>(mean));
}
