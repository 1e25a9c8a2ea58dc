// SPDX-License-Identifier: Apache-2.0
// Gradients of the CCA prologue's parameters, in three launches without atomics.
//
//   weights      S_j = sum_t dy_t z_{t-j}^T, j = 0, 1, 2, of a head, a run of tiles a block: MFMA 32x32x8 with output channels by input
//                channels, all three in the block's registers, 192 a lane -> partial [runs, N, 3, d, d]
//   temperature  where a temperature is zero its key is too, and has lost its direction: the key head's x is computed again, in plain
//                arithmetic, since that happens at the start of a training at most. Elsewhere it ends at once.
//   sum          adds the partials in order, and makes all gradients of them: with u_t = a0 z_{t-1} + a1 z_t + b0
//                dW1 = a1 S_0 + a0 S_1 + b0 sum dy     d a1 = sum_out W1 S_0 + W0 S_1     d b0 = sum_out (W0 + W1) sum dy
//                dW0 = a1 S_1 + a0 S_2 + b0 sum dy     d a0 = sum_out W1 S_1 + W0 S_2     d b1 = sum dy
//
// LDS of `weights`: channels by rows, four rows of a channel together (8 bytes), as the MFMA takes them; see weights_at.
#include "cca_prologue.h"

constexpr float kLeastTemperature = 1e-30f;  // as in cca_prologue_backward.hip
constexpr int kRowQuads = kTile / 4;         // groups of four rows of a tile

// Group `quad` of four rows of channel c, in units of 8 bytes: eight groups a channel, one of them after the other in a turn by channel,
// so that neighbouring channels, which lanes read and write together, lie in different banks.
__device__ __forceinline__ int weights_at(int channel, int quad) { return channel * kRowQuads + ((quad + channel + channel / 8) % kRowQuads); }

HO_KERNEL_WAVES(ho_cca_prologue_backward_weights, kPrologueThreads, 1)
(const bf16* dy, const bf16* projected, const bf16* halo, const uint8_t* starts, float* partial, int64_t row_stride, int64_t batch_stride, int total,
 int rows, int batch, int heads, int groups) {
  HO_LDS(bf16x4, operands, 4 * kHeadDim * kRowQuads);  // dy, then z of this row, the row before, and two before
  const PrologueShape p = {row_stride, batch_stride, 0, 0, total, rows, batch, heads, groups, kHeadDim, 0};
  const int per = heads / groups, channels = channels_of(p);
  const Work work(p, per + 1, (total + kTile - 1) / kTile);
  const int head = work.role == per ? heads + work.group : work.group * per + work.role;
  const int lane = lane_id();
  // A thread loads eight channels of each of four rows that follow each other, of two of the four operands: 128 threads an operand.
  const int chunk = int(threadIdx.x) % 16, quad = int(threadIdx.x) / 16 % 8, pair = int(threadIdx.x) / 128;
  f32x16 acc[3][4] = {};  // wave: 32 output channels; 4 x 32 input channels
  bf16x8 next[2][4];
  const auto load = [&](int tile) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const Row row(tile * kTile + 4 * quad + i, p);
      const bf16* here = projected + row.number * row_stride + row.entry * batch_stride;
#pragma unroll
      for (int which = 0; which < 2; ++which) {
        const int operand = 2 * pair + which, back = operand - 1;
        const bf16* from = here - back * row_stride;
        bool exists = row.live;
        if (operand == 0) from = dy + row.flat(p) * channels;
        else if (back > 0) {
          if (row.starts_at(starts, 0, p) || (back > 1 && row.starts_at(starts, -1, p))) exists = false;
          if (row.t < back) {
            exists = exists && halo;
            from = halo + ((int64_t(row.chunk) * 2 + row.t - back + 2) * batch + row.entry) * channels;
          }
        }
        bf16x8 v = {};
        if (exists) v = load16(from + head * kHeadDim + 8 * chunk);
        next[which][i] = v;
      }
    }
  };
  if (work.first < work.last) load(work.first);
  for (int tile = work.first; tile < work.last; ++tile) {
#pragma unroll
    for (int which = 0; which < 2; ++which) {
#pragma unroll
      for (int e = 0; e < 8; ++e) {
        const bf16x4 four = {next[which][0][e], next[which][1][e], next[which][2][e], next[which][3][e]};
        operands[(2 * pair + which) * kHeadDim * kRowQuads + weights_at(8 * chunk + e, quad)] = four;
      }
    }
    block_sync_lds();  // operands are written
    if (tile + 1 < work.last) load(tile + 1);
#pragma unroll
    for (int s = 0; s < kTile / 8; ++s) {
      HO_NO_FURTHER();
      const int rows_of_lane = 2 * s + lane / 32;
      const bf16x4 a = operands[weights_at(32 * wave_id() + lane % 32, rows_of_lane)];
#pragma unroll
      for (int j = 0; j < 3; ++j)
#pragma unroll
        for (int n = 0; n < 4; ++n) {
          const bf16x4 b = operands[(j + 1) * kHeadDim * kRowQuads + weights_at(32 * n + lane % 32, rows_of_lane)];
          acc[j][n] = mfma_32x32x8(a, b, acc[j][n]);
        }
    }
    block_sync_lds();  // operands are read
  }
  float* out = partial + (int64_t(work.run) * (heads + groups) + head) * 3 * kHeadDim * kHeadDim;
#pragma unroll
  for (int j = 0; j < 3; ++j)
#pragma unroll
    for (int n = 0; n < 4; ++n)
#pragma unroll
      for (int r = 0; r < 16; ++r) out[(j * kHeadDim + 32 * wave_id() + mfma_row<32>(lane, r)) * kHeadDim + 32 * n + lane % 32] = acc[j][n][r];
}

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

constexpr int kSumColumns = 16, kSumSlices = 16;  // input channels a block; of each, so many threads with every kSumSlices-th output channel

HO_KERNEL(ho_cca_prologue_backward_sum, kPrologueThreads)
(const float* partial, const float* partial_bias, const float* partial_temperature, const float* partial_zero, const bf16* depthwise_weight,
 const bf16* depthwise_bias, const bf16* grouped_weight, const float* temperature, bf16* d_depthwise_weight, bf16* d_depthwise_bias, bf16* d_grouped_weight,
 bf16* d_grouped_bias, float* d_temperature, int64_t runs, int64_t bias_runs, int64_t zero_runs, int heads, int groups) {
  HO_LDS(float, db, kHeadDim);
  HO_LDS(float, sums, 3 * kPrologueThreads);
  const int head = int(blockIdx.x) / (kHeadDim / kSumColumns), all = heads + groups, thread = int(threadIdx.x);
  const int column = thread % kSumColumns, slice = thread / kSumColumns, into = int(blockIdx.x) % (kHeadDim / kSumColumns) * kSumColumns + column;
  if (thread < kHeadDim) {
    float total = 0.0f;
    for (int64_t run = 0; run < bias_runs; ++run) total += partial_bias[(run * all + head) * kHeadDim + thread];
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
      for (int64_t run = 0; run < (zero ? zero_runs : bias_runs); ++run) total += from[run * groups + group];
      d_temperature[group] = total;
    }
  }
}

HO_EXPORT int64_t ho_cca_prologue_weights_blocks(int64_t total, int64_t heads, int64_t groups, int64_t processors) {
  return prologue_runs(groups, heads / groups + 1, (total + kTile - 1) / kTile, processors, 1);
}

// Fills partial [runs, N, 3, d, d] and, where a temperature is zero, partial_zero [zero_runs, g].
HO_EXPORT int ho_cca_prologue_weights(const void* dy, const void* d_key, const void* projected, const void* depthwise_weight, const void* depthwise_bias,
                                      const void* grouped_weight, const void* grouped_bias, const void* temperature, const void* rope, const void* halo,
                                      const void* starts, void* partial, void* partial_zero, int64_t row_stride, int64_t batch_stride,
                                      int64_t rope_row_stride, int64_t rope_batch_stride, int64_t k_row, int64_t k_batch, int64_t k_head, int64_t total,
                                      int64_t rows, int64_t batch, int64_t heads, int64_t groups, int64_t rotary, int64_t zero_runs, int64_t processors,
                                      void* stream) {
  if (total > INT32_MAX - kTile) return -1;
  if (total == 0) return 0;
  const int64_t blocks = prologue_blocks(groups, heads / groups + 1, (total + kTile - 1) / kTile, processors, 1);
  const int failed = ho_launch(ho_cca_prologue_backward_weights, dim3(unsigned(blocks)), dim3(kPrologueThreads), stream, static_cast<const bf16*>(dy),
                               static_cast<const bf16*>(projected), static_cast<const bf16*>(halo), static_cast<const uint8_t*>(starts),
                               static_cast<float*>(partial), row_stride, batch_stride, int(total), int(rows), int(batch), int(heads), int(groups));
  if (failed) return failed;
  return ho_launch(ho_cca_prologue_backward_temperature, dim3(unsigned(groups * zero_runs)), dim3(kHeadDim), stream, static_cast<const bf16*>(d_key),
                   static_cast<const bf16*>(projected), static_cast<const bf16*>(depthwise_weight), static_cast<const bf16*>(depthwise_bias),
                   static_cast<const bf16*>(grouped_weight), static_cast<const bf16*>(grouped_bias), static_cast<const float*>(temperature),
                   static_cast<const float*>(rope), static_cast<const bf16*>(halo), static_cast<const uint8_t*>(starts), static_cast<float*>(partial_zero),
                   row_stride, batch_stride, rope_row_stride, rope_batch_stride, k_row, k_batch, k_head, int(total), int(rows), int(batch), int(heads),
                   int(groups), int(rotary));
}

HO_EXPORT int ho_cca_prologue_sum(const void* partial, const void* partial_bias, const void* partial_temperature, const void* partial_zero,
                                  const void* depthwise_weight, const void* depthwise_bias, const void* grouped_weight, const void* temperature,
                                  void* d_depthwise_weight, void* d_depthwise_bias, void* d_grouped_weight, void* d_grouped_bias, void* d_temperature,
                                  int64_t runs, int64_t bias_runs, int64_t zero_runs, int64_t heads, int64_t groups, void* stream) {
  return ho_launch(ho_cca_prologue_backward_sum, dim3(unsigned((heads + groups) * (kHeadDim / kSumColumns))), dim3(kPrologueThreads), stream,
                   static_cast<const float*>(partial), static_cast<const float*>(partial_bias), static_cast<const float*>(partial_temperature),
                   static_cast<const float*>(partial_zero), static_cast<const bf16*>(depthwise_weight), static_cast<const bf16*>(depthwise_bias),
                   static_cast<const bf16*>(grouped_weight), static_cast<const float*>(temperature), static_cast<bf16*>(d_depthwise_weight),
                   static_cast<bf16*>(d_depthwise_bias), static_cast<bf16*>(d_grouped_weight), static_cast<bf16*>(d_grouped_bias),
                   static_cast<float*>(d_temperature), runs, bias_runs, zero_runs, int(heads), int(groups));
}
