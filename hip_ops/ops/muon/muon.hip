// SPDX-License-Identifier: Apache-2.0
// Muon over a list of matrices of any shapes: momentum and weight update in one launch each. muon.h has the computation; this
// file has the kernels, one per combination of dtypes, and their launchers.
#include "muon.h"

using multi_tensor::chunk_rows_of;
using multi_tensor::kThreads;
using multi_tensor::Row;

#define MUON_MOMENTUM(name, G, M, O)                                                                                        \
  HO_KERNEL(name, kThreads)(const Row* __restrict__ rows, const int32_t* __restrict__ chunk_rows, int chunks,               \
                            int chunk_elements, const float* grad_scale, const float* found_inf, float* partials,           \
                            float momentum, float gradient_weight, int nesterov, int ema) {                                 \
    muon::momentum_body<G, M, O>(rows, chunk_rows, chunks, chunk_elements, grad_scale, found_inf, partials, momentum,       \
                                 gradient_weight, nesterov, ema);                                                           \
  }
// ho_muon_momentum_<gradient>_<momentum>_<output>
MUON_MOMENTUM(ho_muon_momentum_bf16_bf16_bf16, bf16, bf16, bf16)
MUON_MOMENTUM(ho_muon_momentum_bf16_bf16_fp32, bf16, bf16, float)
MUON_MOMENTUM(ho_muon_momentum_bf16_fp32_bf16, bf16, float, bf16)
MUON_MOMENTUM(ho_muon_momentum_bf16_fp32_fp32, bf16, float, float)
MUON_MOMENTUM(ho_muon_momentum_fp32_bf16_bf16, float, bf16, bf16)
MUON_MOMENTUM(ho_muon_momentum_fp32_bf16_fp32, float, bf16, float)
MUON_MOMENTUM(ho_muon_momentum_fp32_fp32_bf16, float, float, bf16)
MUON_MOMENTUM(ho_muon_momentum_fp32_fp32_fp32, float, float, float)

HO_KERNEL(ho_muon_square_sums_kernel, kThreads)(const Row* __restrict__ rows, int chunk_elements, const float* found_inf,
                                                const float* __restrict__ partials, float* square_sums) {
  muon::square_sums_body(rows, chunk_elements, found_inf, partials, square_sums);
}

#define MUON_UPDATE(name, U, W, C, copy)                                                                                    \
  HO_KERNEL(name, kThreads)(const Row* __restrict__ rows, const int32_t* __restrict__ chunk_rows, int chunks,               \
                            int chunk_elements, const float* found_inf, const float* lr_pointer, float lr,                  \
                            float weight_decay) {                                                                           \
    muon::update_body<U, W, C, copy>(rows, chunk_rows, chunks, chunk_elements, found_inf, lr_pointer, lr, weight_decay);    \
  }
// ho_muon_update_<update>_<weight>, and _<copy> where the rounded weight goes to a second tensor
MUON_UPDATE(ho_muon_update_bf16_fp32_bf16, bf16, float, bf16, true)
MUON_UPDATE(ho_muon_update_fp32_fp32_bf16, float, float, bf16, true)
MUON_UPDATE(ho_muon_update_bf16_fp32_fp32, bf16, float, float, true)
MUON_UPDATE(ho_muon_update_fp32_fp32_fp32, float, float, float, true)
MUON_UPDATE(ho_muon_update_bf16_bf16, bf16, bf16, bf16, false)
MUON_UPDATE(ho_muon_update_fp32_bf16, float, bf16, bf16, false)
MUON_UPDATE(ho_muon_update_bf16_fp32, bf16, float, float, false)
MUON_UPDATE(ho_muon_update_fp32_fp32, float, float, float, false)

// Launchers. A dtype is its size in bytes: 2 for bf16, 4 for fp32. `table` is as multi_tensor.py packs it.
HO_EXPORT int ho_muon_momentum(const void* table, int64_t tensors, int64_t chunks, int64_t chunk_elements, int64_t blocks,
                               int64_t gradient_bytes, int64_t momentum_bytes, int64_t output_bytes,
                               const void* grad_scale, const void* found_inf, void* partials, void* square_sums,
                               float momentum, float gradient_weight, int64_t nesterov, int64_t ema, void* stream) {
  using Kernel = void (*)(const Row*, const int32_t*, int, int, const float*, const float*, float*, float, float, int, int);
  static const Kernel kernels[2][2][2] = {
      {{ho_muon_momentum_bf16_bf16_bf16, ho_muon_momentum_bf16_bf16_fp32},
       {ho_muon_momentum_bf16_fp32_bf16, ho_muon_momentum_bf16_fp32_fp32}},
      {{ho_muon_momentum_fp32_bf16_bf16, ho_muon_momentum_fp32_bf16_fp32},
       {ho_muon_momentum_fp32_fp32_bf16, ho_muon_momentum_fp32_fp32_fp32}},
  };
  for (int64_t bytes : {gradient_bytes, momentum_bytes, output_bytes})
    if (bytes != 2 && bytes != 4) return -1;
  const Row* rows = static_cast<const Row*>(table);
  const int code = ho_launch(kernels[gradient_bytes == 4][momentum_bytes == 4][output_bytes == 4], dim3(unsigned(min_of(blocks, chunks))),
                             dim3(kThreads), stream, rows, chunk_rows_of(table, tensors), int(chunks), int(chunk_elements),
                             static_cast<const float*>(grad_scale), static_cast<const float*>(found_inf),
                             static_cast<float*>(partials), momentum, gradient_weight, int(nesterov), int(ema));
  if (code != 0 || partials == nullptr) return code;
  return ho_launch(ho_muon_square_sums_kernel, dim3(unsigned(tensors)), dim3(kThreads), stream, rows, int(chunk_elements),
                   static_cast<const float*>(found_inf), static_cast<const float*>(partials), static_cast<float*>(square_sums));
}

// `copy_bytes` is 0 where the weight is the parameter itself.
HO_EXPORT int ho_muon_update(const void* table, int64_t tensors, int64_t chunks, int64_t chunk_elements, int64_t blocks,
                             int64_t update_bytes, int64_t weight_bytes, int64_t copy_bytes, const void* found_inf,
                             const void* lr_pointer, float lr, float weight_decay, void* stream) {
  using Kernel = void (*)(const Row*, const int32_t*, int, int, const float*, const float*, float, float);
  const bool wide = update_bytes == 4;
  Kernel kernel = nullptr;
  if (update_bytes != 2 && update_bytes != 4) return -1;
  if (copy_bytes == 0 && weight_bytes == 2) kernel = wide ? ho_muon_update_fp32_bf16 : ho_muon_update_bf16_bf16;
  if (copy_bytes == 0 && weight_bytes == 4) kernel = wide ? ho_muon_update_fp32_fp32 : ho_muon_update_bf16_fp32;
  if (copy_bytes == 2 && weight_bytes == 4) kernel = wide ? ho_muon_update_fp32_fp32_bf16 : ho_muon_update_bf16_fp32_bf16;
  if (copy_bytes == 4 && weight_bytes == 4) kernel = wide ? ho_muon_update_fp32_fp32_fp32 : ho_muon_update_bf16_fp32_fp32;
  if (kernel == nullptr) return -1;
  return ho_launch(kernel, dim3(unsigned(min_of(blocks, chunks))), dim3(kThreads), stream, static_cast<const Row*>(table),
                   chunk_rows_of(table, tensors), int(chunks), int(chunk_elements), static_cast<const float*>(found_inf),
                   static_cast<const float*>(lr_pointer), lr, weight_decay);
}
