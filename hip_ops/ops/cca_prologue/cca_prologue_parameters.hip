// SPDX-License-Identifier: Apache-2.0
// Gradients of the CCA prologue's parameters from the partial sums of cca_prologue_backward.hip, in two launches without atomics.
//
//   temperature  where a temperature is zero, the key is zero and has lost its direction: the key head's x is computed again, in slow
//                scalar arithmetic, because this happens only at the start of a training. Other heads return at once.
//   sum          adds the partials in order, and computes all gradients from them: with S_j = sum_t dy_{t+j} z_t^T and u_t = a0 z_{t-1} + a1 z_t + b0
//                dW1 = a1 S_0 + a0 S_1 + b0 sum dy     d a1 = sum_out W1 S_0 + W0 S_1     d b0 = sum_out (W0 + W1) sum dy
//                dW0 = a1 S_1 + a0 S_2 + b0 sum dy     d a0 = sum_out W1 S_1 + W0 S_2     d b1 = sum dy
#include "cca_prologue.h"

HO_KERNEL(ho_cca_prologue_backward_temperature, kHeadDim)
(const bf16* d_key, const bf16* projected, const bf16* depthwise_weight, const bf16* depthwise_bias, const bf16* grouped_weight, const bf16* grouped_bias,
 const float* temperature, const float* rope, const bf16* halo, const uint8_t* starts, float* partial, int64_t row_stride, int64_t batch_stride,
 int64_t rope_row_stride, int64_t rope_batch_stride, int64_t k_row, int64_t k_batch, int64_t k_head, int total, int rows, int batch, int heads, int groups,
 int rotary) {
  HO_LDS(float, u, 2 * kHeadDim);
  HO_LDS(float, x_of, kHeadDim);
  HO_LDS(float, sums, 4);
  const PrologueShape p = {row_stride, batch_stride, rope_row_stride, rope_batch_stride, total, rows, batch, heads, groups, rotary, 0};
  const int group = int(blockIdx.x) % groups, run = int(blockIdx.x) / groups, runs = int(gridDim.x) / groups;
  if (fabsf(load_global(temperature + group)) >= kLeastTemperature) return;
  const int per = heads / groups, channel = int(threadIdx.x), at = (heads + group) * kHeadDim + channel, channels = channels_of(p);
  const float a0 = bf16_to_float(depthwise_weight[2 * at]), a1 = bf16_to_float(depthwise_weight[2 * at + 1]), b0 = bf16_to_float(depthwise_bias[at]);
  float along = 0.0f;
  for (int f = run; f < total; f += runs) {
    const Row row(f, p);
    const bf16* here = projected + row.number * row_stride + row.entry * batch_stride;
    float z[3];
    for (int back = 0; back < 3; ++back) {
      bool exists = back == 0 || !row.starts_at(starts, 0, p);
      if (back == 2 && row.starts_at(starts, -1, p)) exists = false;
      const bf16* from = here - back * row_stride;
      if (row.t < back) {
        exists = exists && halo;
        from = halo + ((int64_t(row.chunk) * 2 + row.t - back + 2) * batch + row.entry) * channels;
      }
      z[back] = exists ? bf16_to_float(from[at]) : 0.0f;
    }
    u[2 * channel] = bf16_to_float(float_to_bf16(fmaf(a0, z[2], fmaf(a1, z[1], b0))));
    u[2 * channel + 1] = bf16_to_float(float_to_bf16(fmaf(a0, z[1], fmaf(a1, z[0], b0))));
    block_sync_lds();  // u is written
    float x = bf16_to_float(grouped_bias[at]), mean = 0.0f;
    for (int k = 0; k < 2 * kHeadDim; ++k) x = fmaf(bf16_to_float(grouped_weight[int64_t(at) * 2 * kHeadDim + k]), u[k], x);
    for (int i = 0; i < per; ++i) mean += bf16_to_float(here[(group * per + i) * kHeadDim + channel]);
    x += 0.5f * (mean / float(per) + z[0]);
    x_of[channel] = x;
    block_sync_lds();  // x is written
    float turned = x;
    if (rope && channel < rotary) {
      const float* angle = rope + row.number * rope_row_stride + row.entry * rope_batch_stride + channel % (rotary / 2);
      turned = x * angle[0] + (channel < rotary / 2 ? -x_of[channel + rotary / 2] : x_of[channel - rotary / 2]) * angle[rotary / 2];
    }
    const float square = wave_sum(x * x), product = wave_sum(turned * bf16_to_float(d_key[row.number * k_row + row.entry * k_batch + group * k_head + channel]));
    if (lane_id() == 0) sums[wave_id()] = square, sums[2 + wave_id()] = product;
    block_sync_lds();  // sums are written, and u and x are read
    along = fmaf(sums[2] + sums[3], rsqrtf(max_of(sums[0] + sums[1], kPrologueEps * kPrologueEps)), along);
    block_sync_lds();  // sums are read
  }
  if (channel == 0) partial[run * groups + group] = along * sqrtf(float(kHeadDim));
}

constexpr int kSumColumns = 16, kSumSlices = 16;  // input channels per block; for each, kSumSlices threads with every kSumSlices-th output channel

HO_KERNEL(ho_cca_prologue_backward_sum, kPrologueThreads)
(const float* partial, const float* partial_bias, const float* partial_temperature, const float* partial_zero, const bf16* depthwise_weight,
 const bf16* depthwise_bias, const bf16* grouped_weight, const float* temperature, bf16* d_depthwise_weight, bf16* d_depthwise_bias, bf16* d_grouped_weight,
 bf16* d_grouped_bias, float* d_temperature, int64_t runs, int64_t zero_runs, int heads, int groups) {
  HO_LDS(float, db, kHeadDim);
  HO_LDS(float, sums, 3 * kPrologueThreads);
  const int head = int(blockIdx.x) / (kHeadDim / kSumColumns), all = heads + groups, thread = int(threadIdx.x);
  const int column = thread % kSumColumns, slice = thread / kSumColumns, into = int(blockIdx.x) % (kHeadDim / kSumColumns) * kSumColumns + column;
  if (thread < kHeadDim) {
    float total = 0.0f;
    for (int64_t run = 0; run < runs; ++run) total += partial_bias[(run * all + head) * kHeadDim + thread];
    db[thread] = total;
  }
  block_sync_lds();  // db is written
  const int at = head * kHeadDim + into;
  const float a0 = bf16_to_float(depthwise_weight[2 * at]), a1 = bf16_to_float(depthwise_weight[2 * at + 1]), b0 = bf16_to_float(depthwise_bias[at]);
  float of_a0 = 0.0f, of_a1 = 0.0f, of_b0 = 0.0f;
  for (int out = slice; out < kHeadDim; out += kSumSlices) {
    float s[3] = {};
    for (int64_t run = 0; run < runs; ++run) {
#pragma unroll
      for (int j = 0; j < 3; ++j) s[j] += partial[(((run * all + head) * 3 + j) * kHeadDim + out) * kHeadDim + into];
    }
    const int64_t weight = (int64_t(head * kHeadDim + out) * kHeadDim + into) * 2;
    const float tap0 = bf16_to_float(grouped_weight[weight]), tap1 = bf16_to_float(grouped_weight[weight + 1]);
    d_grouped_weight[weight] = float_to_bf16(fmaf(a1, s[1], fmaf(a0, s[2], b0 * db[out])));
    d_grouped_weight[weight + 1] = float_to_bf16(fmaf(a1, s[0], fmaf(a0, s[1], b0 * db[out])));
    of_a0 = fmaf(tap1, s[1], fmaf(tap0, s[2], of_a0));
    of_a1 = fmaf(tap1, s[0], fmaf(tap0, s[1], of_a1));
    of_b0 = fmaf(tap0 + tap1, db[out], of_b0);
  }
  sums[thread] = of_a0, sums[kPrologueThreads + thread] = of_a1, sums[2 * kPrologueThreads + thread] = of_b0;
  block_sync_lds();  // sums are written
  if (slice == 0) {
    float total[3] = {};
    for (int i = 0; i < kSumSlices; ++i)
#pragma unroll
      for (int j = 0; j < 3; ++j) total[j] += sums[j * kPrologueThreads + i * kSumColumns + column];
    d_depthwise_weight[2 * at] = float_to_bf16(total[0]), d_depthwise_weight[2 * at + 1] = float_to_bf16(total[1]);
    d_depthwise_bias[at] = float_to_bf16(total[2]);
  }
  if (into / kSumColumns == 0) {
    if (thread < kHeadDim) d_grouped_bias[head * kHeadDim + thread] = float_to_bf16(db[thread]);
    if (thread == 0 && head >= heads) {
      const int group = head - heads;
      const bool zero = fabsf(temperature[group]) < kLeastTemperature;
      const float* from = zero ? partial_zero : partial_temperature;
      float total = 0.0f;
      for (int64_t run = 0; run < (zero ? zero_runs : runs); ++run) total += from[run * groups + group];
      d_temperature[group] = total;
    }
  }
}

// Fills partial_zero [zero_runs, g] where a temperature is zero, then all gradients of parameters; partial, partial_bias and
// partial_temperature are those of ho_cca_prologue_backward, d_temperature is fp32.
HO_EXPORT int ho_cca_prologue_parameters(const void* d_key, const void* projected, const void* depthwise_weight, const void* depthwise_bias,
                                         const void* grouped_weight, const void* grouped_bias, const void* temperature, const void* rope, const void* halo,
                                         const void* starts, const void* partial, const void* partial_bias, const void* partial_temperature,
                                         void* partial_zero, void* d_depthwise_weight, void* d_depthwise_bias, void* d_grouped_weight,
                                         void* d_grouped_bias, void* d_temperature, int64_t row_stride, int64_t batch_stride, int64_t rope_row_stride,
                                         int64_t rope_batch_stride, int64_t k_row, int64_t k_batch, int64_t k_head, int64_t total, int64_t rows,
                                         int64_t batch, int64_t heads, int64_t groups, int64_t rotary, int64_t runs, int64_t zero_runs, void* stream) {
  if (total > INT32_MAX - kTile) return -1;
  if (total == 0) return 0;
  const int failed = ho_launch(ho_cca_prologue_backward_temperature, dim3(unsigned(groups * zero_runs)), dim3(kHeadDim), stream,
                               static_cast<const bf16*>(d_key), static_cast<const bf16*>(projected), static_cast<const bf16*>(depthwise_weight),
                               static_cast<const bf16*>(depthwise_bias), static_cast<const bf16*>(grouped_weight), static_cast<const bf16*>(grouped_bias),
                               static_cast<const float*>(temperature), static_cast<const float*>(rope), static_cast<const bf16*>(halo),
                               static_cast<const uint8_t*>(starts), static_cast<float*>(partial_zero), row_stride, batch_stride, rope_row_stride,
                               rope_batch_stride, k_row, k_batch, k_head, int(total), int(rows), int(batch), int(heads), int(groups), int(rotary));
  if (failed) return failed;
  return ho_launch(ho_cca_prologue_backward_sum, dim3(unsigned((heads + groups) * (kHeadDim / kSumColumns))), dim3(kPrologueThreads), stream,
                   static_cast<const float*>(partial), static_cast<const float*>(partial_bias), static_cast<const float*>(partial_temperature),
                   static_cast<const float*>(partial_zero), static_cast<const bf16*>(depthwise_weight), static_cast<const bf16*>(depthwise_bias),
                   static_cast<const bf16*>(grouped_weight), static_cast<const float*>(temperature), static_cast<bf16*>(d_depthwise_weight),
                   static_cast<bf16*>(d_depthwise_bias), static_cast<bf16*>(d_grouped_weight), static_cast<bf16*>(d_grouped_bias),
                   static_cast<float*>(d_temperature), runs, zero_runs, int(heads), int(groups));
}
