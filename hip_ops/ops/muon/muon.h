// SPDX-License-Identifier: Apache-2.0
// Muon's momentum and weight update, one chunk after another. Arithmetic is fp32; every result is rounded once, when it is stored.
#pragma once

#include "multi_tensor.h"

namespace muon {

using namespace multi_tensor;

// torch.lerp with its two forms, exact at weights 0 and 1, each with one fused multiply-add.
__device__ __forceinline__ float lerp(float start, float end, float weight) {
  const bool near = fabsf(weight) < 0.5f;
  return fmaf(near ? weight : weight - 1.0f, end - start, near ? start : end);
}

struct MomentumRule {
  float grad_scale, momentum, gradient_weight;
  // ema is always true. Without its branch clang loads a whole thread's share at once: 100 VGPRs in place of 58, 4 waves in place of 8.
  bool nesterov, ema;

  __device__ __forceinline__ float next(float buffer, float gradient) const {
    return ema ? lerp(buffer, gradient, gradient_weight) : fmaf(momentum, buffer, gradient);
  }
  __device__ __forceinline__ float output(float stored, float gradient) const {
    if (!nesterov) return stored;
    return ema ? lerp(gradient, stored, momentum) : fmaf(momentum, stored, gradient);
  }
};

template <class G, class M, class O> struct MomentumWork {
  const G* gradients;
  M* momenta;
  O* outputs;
  MomentumRule rule;
  float squares;  // of the outputs as stored

  template <int kVectors, int kWidth> __device__ __forceinline__ void run(int at) {
    constexpr int kStride = kThreads * kWidth;
    Lane<G, kWidth> gradient[kVectors];
    Lane<M, kWidth> momentum[kVectors];
    Lane<O, kWidth> output;
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      gradient[v] = read_once<kWidth>(gradients + at + v * kStride);
      momentum[v] = read_once<kWidth>(momenta + at + v * kStride);
    }
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
#pragma unroll
      for (int i = 0; i < kWidth; ++i) {
        const float g = to_float(G(gradient[v][i])) * rule.grad_scale;
        const M stored = rounded<M>(rule.next(to_float(M(momentum[v][i])), g));
        const O out = rounded<O>(rule.output(to_float(stored), g));
        momentum[v][i] = stored;
        output[i] = out;
        squares = fmaf(to_float(out), to_float(out), squares);
      }
      write_once<kWidth>(momenta + at + v * kStride, momentum[v]);
      write_once<kWidth>(outputs + at + v * kStride, output);
    }
  }
};

// partials[chunk] = sum of squares of the chunk's stored outputs, where `partials` is not null. The order of summation
// depends on the chunk alone, never on the grid.
template <class G, class M, class O>
__device__ __forceinline__ void momentum_body(const Row* __restrict__ rows, const int32_t* __restrict__ chunk_rows,
                                              int chunks, int chunk_elements, const float* grad_scale,
                                              const float* found_inf, float* partials, float momentum,
                                              float gradient_weight, int nesterov, int ema) {
  constexpr int kWidth = vector_width<G, M, O>(), kWaves = kThreads / kWave;
  HO_LDS(float, wave_squares, 2 * kWaves);
  if (found_inf && *found_inf != 0.0f) return;
  const MomentumRule rule{grad_scale ? *grad_scale : 1.0f, momentum, gradient_weight, nesterov != 0, ema != 0};
  int side = 0;
  for (int chunk = blockIdx.x; chunk < chunks; chunk += gridDim.x) {
    const Row row = rows[chunk_rows[chunk]];
    const Chunk c = chunk_of<kWidth>(row, chunk, chunk_elements);
    MomentumWork<G, M, O> work{reinterpret_cast<const G*>(row.address[0]) + c.base,
                               reinterpret_cast<M*>(row.address[1]) + c.base,
                               reinterpret_cast<O*>(row.address[2]) + c.base, rule, 0.0f};
    for_each_element<kWidth>(c, work);
    if (partials) {
      // Two sides alternate: a thread writes a side again only after the barrier that follows its last read.
      const float sum = wave_sum(work.squares);
      if (lane_id() == 0) wave_squares[side * kWaves + wave_id()] = sum;
      block_sync_lds();
      if (threadIdx.x == 0) {
        float total = wave_squares[side * kWaves];
#pragma unroll
        for (int wave = 1; wave < kWaves; ++wave) total += wave_squares[side * kWaves + wave];
        partials[chunk] = total;
      }
      side ^= 1;
    }
  }
}

// square_sums[place] = sum of a tensor's partial sums; one block per tensor, always in the same order.
__device__ __forceinline__ void square_sums_body(const Row* __restrict__ rows, int chunk_elements, const float* found_inf,
                                                 const float* __restrict__ partials, float* square_sums) {
  constexpr int kWaves = kThreads / kWave;
  HO_LDS(float, wave_sums, kWaves);
  if (found_inf && *found_inf != 0.0f) return;
  const Row row = rows[blockIdx.x];
  const int64_t left = row.numel - (row.head > 0 ? row.head : 0);
  const int count = row.numel == 0 ? 0 : left == 0 ? 1 : int((left + chunk_elements - 1) / chunk_elements);
  float sum = 0.0f;
  for (int i = threadIdx.x; i < count; i += kThreads) sum += partials[row.first_chunk + i];
  sum = wave_sum(sum);
  if (lane_id() == 0) wave_sums[wave_id()] = sum;
  block_sync_lds();
  if (threadIdx.x != 0) return;
  float total = wave_sums[0];
#pragma unroll
  for (int wave = 1; wave < kWaves; ++wave) total += wave_sums[wave];
  square_sums[row.place] = total;
}

template <class U, class W, class C, bool kCopy> struct UpdateWork {
  const U* updates;
  W* weights;
  C* copies;
  float decay, step;

  template <int kVectors, int kWidth> __device__ __forceinline__ void run(int at) {
    constexpr int kStride = kThreads * kWidth;
    Lane<U, kWidth> update[kVectors];
    Lane<W, kWidth> weight[kVectors];
    [[maybe_unused]] Lane<C, kWidth> copy;
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      update[v] = read_once<kWidth>(updates + at + v * kStride);
      weight[v] = read_once<kWidth>(weights + at + v * kStride);
    }
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
#pragma unroll
      for (int i = 0; i < kWidth; ++i) {
        const float w = fmaf(-step, to_float(U(update[v][i])), to_float(W(weight[v][i])) * decay);
        weight[v][i] = rounded<W>(w);
        if constexpr (kCopy) copy[i] = rounded<C>(w);
      }
      write_once<kWidth>(weights + at + v * kStride, weight[v]);
      if constexpr (kCopy) write_once<kWidth>(copies + at + v * kStride, copy);
    }
  }
};

// weight = weight * (1 - lr * weight_decay) - lr * scale * update; the copy gets the same number rounded.
template <class U, class W, class C, bool kCopy>
__device__ __forceinline__ void update_body(const Row* __restrict__ rows, const int32_t* __restrict__ chunk_rows,
                                            int chunks, int chunk_elements, const float* found_inf,
                                            const float* lr_pointer, float lr, float weight_decay) {
  constexpr int kWidth = vector_width<U, W, C>();  // C is W where there is no copy
  if (found_inf && *found_inf != 0.0f) return;
  const float rate = lr_pointer ? *lr_pointer : lr;
  const float decay = fmaf(-rate, weight_decay, 1.0f);
  for (int chunk = blockIdx.x; chunk < chunks; chunk += gridDim.x) {
    const Row row = rows[chunk_rows[chunk]];
    const Chunk c = chunk_of<kWidth>(row, chunk, chunk_elements);
    UpdateWork<U, W, C, kCopy> work{reinterpret_cast<const U*>(row.address[0]) + c.base,
                                    reinterpret_cast<W*>(row.address[1]) + c.base,
                                    reinterpret_cast<C*>(row.address[2]) + (kCopy ? c.base : 0), decay, rate * row.scale};
    for_each_element<kWidth>(c, work);
  }
}

}  // namespace muon
