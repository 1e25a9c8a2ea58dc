// SPDX-License-Identifier: Apache-2.0
// SwiGLU with the routing weight, silu(gate) * up * prob, forward and backward; a wave per row. Arithmetic is fp32, each result rounded once.
// Rows at and beyond offsets[experts - 1] are padding rows: they are not read, and zeros are written.
#include "row_vectors.h"

namespace swiglu {

using namespace rows;

// 1 / (1 + exp(-x)). The argument of 2^x is kept in two parts: one rounding would cost |x| / 2 ULP of the result. It is bounded, because an
// infinite power times the second part could be a NaN.
__device__ __forceinline__ float sigmoid(float x) {
#if HO_HIP
  constexpr float kLog2E = 1.44269504f, kRest = 1.92596303e-8f, kLn2 = 0.693147181f;
  const float high = fminf(-x * kLog2E, 126.0f), low = fmaf(-x, kLog2E, -high) - x * kRest;
  const float power = __builtin_amdgcn_exp2f(high);
  return __builtin_amdgcn_rcpf(1.0f + fmaf(power, low * kLn2, power));
#else
  return 1.0f / (1.0f + expf(-x));
#endif
}

template <class T, int kWidth>
struct ForwardWork {
  const T* gate_up;
  T* out;
  int width;
  float prob;
  bool live;

  template <int kNow> __device__ __forceinline__ void run(int at) {
    constexpr int kStep = kWave * kWidth;
    if (!live) {
#pragma unroll
      for (int p = 0; p < kNow; ++p) zeros<T, kWidth>().write(out + at + p * kStep);
      return;
    }
    Lane<T, kWidth> gate[kNow], up[kNow];
#pragma unroll
    for (int p = 0; p < kNow; ++p) gate[p].read(gate_up + at + p * kStep), up[p].read(gate_up + width + at + p * kStep);
#pragma unroll
    for (int p = 0; p < kNow; ++p) {
#pragma unroll
      for (int i = 0; i < kWidth; ++i) {
        const float g = to_float(gate[p].get(i));
        gate[p].set(i, rounded<T>(g * sigmoid(g) * to_float(up[p].get(i)) * prob));
      }
      gate[p].write(out + at + p * kStep);
    }
  }
};

template <class T, int kWidth>
struct BackwardWork {
  const T* grad;
  const T* gate_up;
  T* d_gate_up;
  T* out;  // or null
  int width;
  float prob;
  bool live;
  float d_prob;

  template <int kNow> __device__ __forceinline__ void run(int at) {
    constexpr int kStep = kWave * kWidth;
    if (!live) {
#pragma unroll
      for (int p = 0; p < kNow; ++p) {
        const Lane<T, kWidth> nothing = zeros<T, kWidth>();
        nothing.write(d_gate_up + at + p * kStep), nothing.write(d_gate_up + width + at + p * kStep);
        if (out) nothing.write(out + at + p * kStep);
      }
      return;
    }
    Lane<T, kWidth> gate[kNow], up[kNow], upstream[kNow];
#pragma unroll
    for (int p = 0; p < kNow; ++p) {
      gate[p].read(gate_up + at + p * kStep), up[p].read(gate_up + width + at + p * kStep);
      upstream[p].read(grad + at + p * kStep);
    }
#pragma unroll
    for (int p = 0; p < kNow; ++p) {
#pragma unroll
      for (int i = 0; i < kWidth; ++i) {
        const float g = to_float(gate[p].get(i)), u = to_float(up[p].get(i)), dy = to_float(upstream[p].get(i));
        const float s = sigmoid(g), silu = g * s, product = silu * u, weighted = dy * prob;
        d_prob = fmaf(dy, product, d_prob);
        gate[p].set(i, rounded<T>(weighted * u * fmaf(silu, 1.0f - s, s)));  // d silu = s + silu (1 - s)
        up[p].set(i, rounded<T>(weighted * silu));
        upstream[p].set(i, rounded<T>(product * prob));
      }
      gate[p].write(d_gate_up + at + p * kStep), up[p].write(d_gate_up + width + at + p * kStep);
      if (out) upstream[p].write(out + at + p * kStep);
    }
  }
};

__device__ __forceinline__ int64_t live_rows(const int32_t* offsets, int experts, int64_t count) {
  return offsets ? offsets[experts - 1] : count;
}

template <class T, bool kAligned>
__device__ __forceinline__ void forward_body(const T* __restrict__ gate_up, const void* __restrict__ probs, const int32_t* __restrict__ offsets,
                                             T* __restrict__ out, int64_t count, int width, int64_t gate_up_stride, int experts,
                                             int bf16_probs) {
  constexpr int kWidth = kWidthOf<T, kAligned>, kPieces = 4;
  const int64_t end = live_rows(offsets, experts, count);
  for (int64_t row = first_row(); row < count; row += row_step()) {
    const bool live = row < end;
    ForwardWork<T, kWidth> work{gate_up + row * gate_up_stride, out + row * width, width, live ? load_number(probs, row, bf16_probs) : 0.0f, live};
    for_each_piece<kPieces, kWidth>(width, work);
  }
}

template <class T, bool kAligned>
__device__ __forceinline__ void backward_body(const T* __restrict__ grad, const T* __restrict__ gate_up, const void* __restrict__ probs,
                                              const int32_t* __restrict__ offsets, T* __restrict__ d_gate_up, void* __restrict__ d_probs,
                                              T* __restrict__ out, int64_t count, int width, int64_t grad_stride, int64_t gate_up_stride,
                                              int experts, int bf16_probs) {
  constexpr int kWidth = kWidthOf<T, kAligned>, kPieces = 2;
  const int64_t end = live_rows(offsets, experts, count);
  for (int64_t row = first_row(); row < count; row += row_step()) {
    const bool live = row < end;
    BackwardWork<T, kWidth> work{grad + row * grad_stride, gate_up + row * gate_up_stride, d_gate_up + row * (2 * int64_t(width)),
                                 out ? out + row * width : nullptr, width, live ? load_number(probs, row, bf16_probs) : 0.0f, live, 0.0f};
    for_each_piece<kPieces, kWidth>(width, work);
    const float d_prob = wave_sum(work.d_prob);
    if (lane_id() == 0) store_number(d_probs, row, bf16_probs, d_prob);
  }
}

}  // namespace swiglu

#define SWIGLU(name, T, aligned)                                                                                                    \
  HO_KERNEL(name, rows::kThreads)(const T* __restrict__ gate_up, const void* __restrict__ probs, const int32_t* __restrict__ offsets, \
                                  T* __restrict__ out, int64_t count, int width, int64_t gate_up_stride, int experts, int bf16_probs) { \
    swiglu::forward_body<T, aligned>(gate_up, probs, offsets, out, count, width, gate_up_stride, experts, bf16_probs);              \
  }
SWIGLU(ho_weighted_swiglu_bf16, bf16, true)
SWIGLU(ho_weighted_swiglu_fp32, float, true)
SWIGLU(ho_weighted_swiglu_any_bf16, bf16, false)
SWIGLU(ho_weighted_swiglu_any_fp32, float, false)

#define SWIGLU_BACKWARD(name, T, aligned)                                                                                           \
  HO_KERNEL(name, rows::kThreads)(const T* __restrict__ grad, const T* __restrict__ gate_up, const void* __restrict__ probs,        \
                                  const int32_t* __restrict__ offsets, T* __restrict__ d_gate_up, void* __restrict__ d_probs,       \
                                  T* __restrict__ out, int64_t count, int width, int64_t grad_stride, int64_t gate_up_stride,       \
                                  int experts, int bf16_probs) {                                                                    \
    swiglu::backward_body<T, aligned>(grad, gate_up, probs, offsets, d_gate_up, d_probs, out, count, width, grad_stride,            \
                                      gate_up_stride, experts, bf16_probs);                                                         \
  }
SWIGLU_BACKWARD(ho_weighted_swiglu_backward_bf16, bf16, true)
SWIGLU_BACKWARD(ho_weighted_swiglu_backward_fp32, float, true)
SWIGLU_BACKWARD(ho_weighted_swiglu_backward_any_bf16, bf16, false)
SWIGLU_BACKWARD(ho_weighted_swiglu_backward_any_fp32, float, false)

// Launchers; element_bytes, aligned and blocks as in expert_rows.hip. If `offsets` is null, all rows belong to experts.
HO_EXPORT int ho_weighted_swiglu(const void* gate_up, const void* probs, const void* offsets, void* out, int64_t count, int64_t width,
                                 int64_t gate_up_stride, int64_t experts, int64_t element_bytes, int64_t prob_bytes, int64_t aligned,
                                 int64_t blocks, void* stream) {
  if ((element_bytes != 2 && element_bytes != 4) || (prob_bytes != 2 && prob_bytes != 4) || width > INT32_MAX / 2) return -1;
  const dim3 grid{unsigned(blocks)}, block(rows::kThreads);
  const int32_t* const ends = static_cast<const int32_t*>(offsets);
  if (element_bytes == 2)
    return ho_launch(aligned ? ho_weighted_swiglu_bf16 : ho_weighted_swiglu_any_bf16, grid, block, stream, static_cast<const bf16*>(gate_up),
                     probs, ends, static_cast<bf16*>(out), count, int(width), gate_up_stride, int(experts), int(prob_bytes == 2));
  return ho_launch(aligned ? ho_weighted_swiglu_fp32 : ho_weighted_swiglu_any_fp32, grid, block, stream, static_cast<const float*>(gate_up),
                   probs, ends, static_cast<float*>(out), count, int(width), gate_up_stride, int(experts), int(prob_bytes == 2));
}

// `out` may be null.
HO_EXPORT int ho_weighted_swiglu_backward(const void* grad, const void* gate_up, const void* probs, const void* offsets, void* d_gate_up,
                                          void* d_probs, void* out, int64_t count, int64_t width, int64_t grad_stride,
                                          int64_t gate_up_stride, int64_t experts, int64_t element_bytes, int64_t prob_bytes,
                                          int64_t aligned, int64_t blocks, void* stream) {
  if ((element_bytes != 2 && element_bytes != 4) || (prob_bytes != 2 && prob_bytes != 4) || width > INT32_MAX / 2) return -1;
  const dim3 grid{unsigned(blocks)}, block(rows::kThreads);
  const int32_t* const ends = static_cast<const int32_t*>(offsets);
  if (element_bytes == 2)
    return ho_launch(aligned ? ho_weighted_swiglu_backward_bf16 : ho_weighted_swiglu_backward_any_bf16, grid, block, stream,
                     static_cast<const bf16*>(grad), static_cast<const bf16*>(gate_up), probs, ends, static_cast<bf16*>(d_gate_up), d_probs,
                     static_cast<bf16*>(out), count, int(width), grad_stride, gate_up_stride, int(experts), int(prob_bytes == 2));
  return ho_launch(aligned ? ho_weighted_swiglu_backward_fp32 : ho_weighted_swiglu_backward_any_fp32, grid, block, stream,
                   static_cast<const float*>(grad), static_cast<const float*>(gate_up), probs, ends, static_cast<float*>(d_gate_up), d_probs,
                   static_cast<float*>(out), count, int(width), grad_stride, gate_up_stride, int(experts), int(prob_bytes == 2));
}
