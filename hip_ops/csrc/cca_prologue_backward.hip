// SPDX-License-Identifier: Apache-2.0
// Gradients of the CCA prologue with respect to its inputs, in two launches; those of the parameters are in cca_prologue_weights.hip.
//
//   rows    d_query, d_key, query, key -> dy, the gradient of x, head by head, without the convolutions: query and key are x's direction,
//           and inverse_norm its length. With it the sums over rows of dy and of the temperature's gradient, a block each. Value heads
//           copy, delayed channels to the row before.
//   input   dz_t = M_0^T dy_t + M_1^T dy_{t+1} + M_2^T dy_{t+2}, as far as those rows reach back, with the merged taps M_0 = a1 W1,
//           M_1 = a0 W1 + a1 W0, M_2 = a0 W0, which stay in the registers of the block, and the means' part. Rows -2 and -1 give halo's.
//
// Layouts as in cca_prologue.h. LDS of `input` holds a tile's dy with the two rows behind it, 256 bytes a row, chunk c of row r at c ^ (r % 8).
#include "cca_prologue.h"

constexpr float kLeastTemperature = 1e-30f;  // below it keys do not tell their direction

struct RowsPointers {
  const bf16 *d_query, *d_key, *d_value, *query, *key;
  const float *inverse_norm, *temperature, *rope;
  const uint8_t* starts;
  bf16 *dy, *d_projected, *d_value_halo;
  float *partial_bias, *partial_temperature;
  int64_t q_row, q_batch, q_head, k_row, k_batch, k_head, v_row, v_batch, v_head;  // strides
};

__device__ __forceinline__ void give_values(const Work& work, const RowsPointers& g, const PrologueShape& p) {
  const int values = p.groups * kHeadDim, current = values - p.delayed, width = channels_of(p) + values;
  for (int tile = work.first; tile < work.last; ++tile) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const Row row(tile * kTile + row_of_thread(i), p);
      if (!row.live) continue;
      const bool near = !row.starts_at(g.starts, 0, p);
      bf16* out = g.d_projected + row.flat(p) * width + channels_of(p);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int inside = half * (kHeadDim / 2) + int(threadIdx.x) % 16 * 4, channel = work.group * kHeadDim + inside;
        const bool late = channel >= current;
        const bf16x4 nothing = {};
        const bf16x4 v = late && !near ? nothing : load4(g.d_value + row.number * g.v_row + row.entry * g.v_batch + work.group * g.v_head + inside);
        if (!late) *reinterpret_cast<bf16x4*>(out + channel) = v;
        else if (row.t > 0) *reinterpret_cast<bf16x4*>(out - int64_t(p.batch) * width + channel) = v;
        else if (g.d_value_halo) *reinterpret_cast<bf16x4*>(g.d_value_halo + (int64_t(row.chunk) * p.batch + row.entry) * p.delayed + channel - current) = v;
        if (late && row.t == p.rows - 1) *reinterpret_cast<bf16x4*>(out + channel) = nothing;
      }
    }
  }
}

// Adds what the 16 groups of threads of a block have for the same channels; the first 16 threads get the sum.
__device__ __forceinline__ void sum_over_rows(float (&sum)[4], f32x4* slots) {
  const f32x4 mine = {sum[0], sum[1], sum[2], sum[3]};
  slots[threadIdx.x] = mine;
  block_sync_lds();
  if (threadIdx.x < 16) {
#pragma unroll 1
    for (int group = 1; group < kPrologueThreads / 16; ++group) {
      const f32x4 other = slots[group * 16 + threadIdx.x];
#pragma unroll
      for (int e = 0; e < 4; ++e) sum[e] += other[e];
    }
  }
  block_sync_lds();
}

HO_KERNEL(ho_cca_prologue_backward_rows, kPrologueThreads)
(const bf16* d_query, const bf16* d_key, const bf16* d_value, const bf16* query, const bf16* key, const float* inverse_norm, const float* temperature,
 const float* rope, const uint8_t* starts, bf16* dy, bf16* d_projected, bf16* d_value_halo, float* partial_bias, float* partial_temperature, int64_t q_row,
 int64_t q_batch, int64_t q_head, int64_t k_row, int64_t k_batch, int64_t k_head, int64_t v_row, int64_t v_batch, int64_t v_head, int64_t rope_row_stride,
 int64_t rope_batch_stride, int total, int rows, int batch, int heads, int groups, int rotary, int delayed) {
  HO_LDS(f32x4, slots, kPrologueThreads);
  const RowsPointers g = {d_query, d_key, d_value, query, key, inverse_norm, temperature, rope, starts, dy, d_projected, d_value_halo, partial_bias,
                          partial_temperature, q_row, q_batch, q_head, k_row, k_batch, k_head, v_row, v_batch, v_head};
  const PrologueShape p = {0, 0, rope_row_stride, rope_batch_stride, total, rows, batch, heads, groups, rotary, delayed};
  const int per = heads / groups;
  const Work work(p, per + 2, (total + kTile - 1) / kTile);
  if (work.role > per) return give_values(work, g, p);
  const bool is_key = work.role == per;
  const int head = is_key ? heads + work.group : work.group * per + work.role;
  const Quads quads(rotary);
  const float root = sqrtf(float(kHeadDim)), length = is_key ? load_global(temperature + work.group) : 1.0f;
  const float to_unit = fabsf(length) < kLeastTemperature ? 0.0f : 1.0f / (length * root);
  const bf16* const upstream = is_key ? d_key + work.group * k_head : d_query + head * q_head;
  const bf16* const out = is_key ? key + work.group * kHeadDim : query + head * kHeadDim;
  const int64_t row_stride = is_key ? k_row : q_row, batch_stride = is_key ? k_batch : q_batch, out_stride = int64_t(is_key ? groups : heads) * kHeadDim;
  float sum[2][4] = {}, sum_along = 0.0f;
  bf16x4 next_g[2][2], next_out[2][2];
  const auto load = [&](int tile) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const Row row(tile * kTile + row_of_thread(i), p);
      const bf16* of_g = upstream + row.number * row_stride + row.entry * batch_stride;
      const bf16* of_out = out + row.flat(p) * out_stride;
      next_g[i][0] = load4(of_g + quads.first), next_g[i][1] = load4(of_g + quads.second);
      next_out[i][0] = load4(of_out + quads.first), next_out[i][1] = load4(of_out + quads.second);
    }
  };
  if (work.first < work.last) load(work.first);
  for (int tile = work.first; tile < work.last; ++tile) {
    float grad[2][2][4], unit[2][2][4];
#pragma unroll
    for (int i = 0; i < 2; ++i)
#pragma unroll
      for (int q = 0; q < 2; ++q)
#pragma unroll
        for (int e = 0; e < 4; ++e) grad[i][q][e] = bf16_to_float(next_g[i][q][e]), unit[i][q][e] = bf16_to_float(next_out[i][q][e]) * to_unit;
    if (tile + 1 < work.last) load(tile + 1);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const Row row(tile * kTile + row_of_thread(i), p);
      float along = 0.0f;
#pragma unroll
      for (int q = 0; q < 2; ++q)
#pragma unroll
        for (int e = 0; e < 4; ++e) along = fmaf(grad[i][q][e], unit[i][q][e], along);
#pragma unroll
      for (int mask = 8; mask > 0; mask >>= 1) along += wave_xor(along, mask);
      if (!row.live) continue;
      sum_along += along;
      const float inverse = inverse_norm[int64_t(head) * total + row.flat(p)];
      const float removed = inverse < 1.0f / kPrologueEps ? along : 0.0f, factor = inverse * length * root;
      float d[2][4];
#pragma unroll
      for (int q = 0; q < 2; ++q)
#pragma unroll
        for (int e = 0; e < 4; ++e) d[q][e] = fmaf(-removed, unit[i][q][e], grad[i][q][e]) * factor;
      if (rope && quads.first < rotary / 2) {
        const float* angle = rope + row.number * rope_row_stride + row.entry * rope_batch_stride + quads.first;
        const f32x4 cos = *reinterpret_cast<const f32x4*>(angle), sin = *reinterpret_cast<const f32x4*>(angle + rotary / 2);
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          const float one = d[0][e], two = d[1][e];
          d[0][e] = fmaf(one, cos[e], two * sin[e]), d[1][e] = fmaf(two, cos[e], -one * sin[e]);
        }
      }
      bf16* to = dy + row.flat(p) * channels_of(p) + head * kHeadDim;
      store4(to + quads.first, d[0]), store4(to + quads.second, d[1]);
#pragma unroll
      for (int q = 0; q < 2; ++q)
#pragma unroll
        for (int e = 0; e < 4; ++e) sum[q][e] += d[q][e];
    }
  }
  // Run of this block among those of its head: where its sums go.
  const int run = work.run;
  sum_over_rows(sum[0], slots), sum_over_rows(sum[1], slots);
  float along[4] = {sum_along, 0.0f, 0.0f, 0.0f};
  sum_over_rows(along, slots);
  if (threadIdx.x >= 16) return;
  float* bias = partial_bias + (int64_t(run) * (heads + groups) + head) * kHeadDim;
  *reinterpret_cast<f32x4*>(bias + quads.first) = f32x4{sum[0][0], sum[0][1], sum[0][2], sum[0][3]};
  *reinterpret_cast<f32x4*>(bias + quads.second) = f32x4{sum[1][0], sum[1][1], sum[1][2], sum[1][3]};
  if (is_key && threadIdx.x == 0) partial_temperature[run * groups + work.group] = along[0] * root;
}

constexpr int kRowChunks = kHeadDim / 8;  // 16-byte chunks of a row of dy in LDS

__device__ __forceinline__ int dy_chunk_at(int row, int chunk) { return row * kRowChunks + (chunk ^ (row % 8)); }

// A row of `input`: numbered as if each chunk had `early` rows before its own.
struct EarlyRow {
  int t, entry, chunk;
  bool live;
  __device__ __forceinline__ EarlyRow(int f, int all, int early, const PrologueShape& p) {
    live = f < all;
    const int at = live ? f : 0, step = at / p.batch;
    entry = at - step * p.batch;
    chunk = step / (p.rows + early);
    t = step - chunk * (p.rows + early) - early;
  }
  __device__ __forceinline__ int64_t flat(const PrologueShape& p) const { return (int64_t(chunk) * p.rows + t) * p.batch + entry; }
  // Whether the row `ahead` rows on sees this one.
  __device__ __forceinline__ bool seen_from(int ahead, const uint8_t* starts, const PrologueShape& p) const {
    if (!live || t + ahead < 0 || t + ahead >= p.rows) return false;
    const uint8_t* at = starts ? starts + (int64_t(chunk) * (p.rows + 1) + t + 1) * p.batch + entry : nullptr;
    for (int i = 1; i <= ahead; ++i)
      if (at && at[int64_t(i) * p.batch]) return false;
    return true;
  }
};

HO_KERNEL_WAVES(ho_cca_prologue_backward_input, kPrologueThreads, 2)
(const bf16* dy, const bf16* depthwise_weight, const bf16* grouped_weight, const uint8_t* starts, bf16* d_projected, bf16* d_halo, int all, int total,
 int rows, int batch, int heads, int groups) {
  // dy of a tile and of the rows one and two ahead of each; three copies, since a tile may hold many short sequences.
  HO_LDS(bf16x8, ahead, 3 * kTile * kRowChunks);
  HO_LDS(f32x4, dz, kTile* kQuads / 2);  // half of the channels at a time
  const PrologueShape p = {0, 0, 0, 0, total, rows, batch, heads, groups, kHeadDim, 0};
  const int per = heads / groups, early = d_halo ? 2 : 0, channels = channels_of(p), width = channels + groups * kHeadDim;
  const Work work(p, per + 1, (all + kTile - 1) / kTile);
  const bool is_key = work.role == per;
  const int head = is_key ? heads + work.group : work.group * per + work.role, other = is_key ? work.group * per : heads + work.group;
  const int others = is_key ? per : 1;
  const float weight = is_key ? 0.5f : 0.5f / float(per);
  const int lane = lane_id(), into = 32 * wave_id() + lane % 32;  // the lane's input channel in its weights

  // Merged taps as the left operand: lane's channel by eight output channels a step.
  bf16x8 merged[3][8];
  {
    const float a0 = bf16_to_float(depthwise_weight[2 * (head * kHeadDim + into)]), a1 = bf16_to_float(depthwise_weight[2 * (head * kHeadDim + into) + 1]);
#pragma unroll
    for (int s = 0; s < 8; ++s)
#pragma unroll
      for (int e = 0; e < 8; ++e) {
        const bf16* taps = grouped_weight + (int64_t(head * kHeadDim + 16 * s + 8 * (lane / 32) + e) * kHeadDim + into) * 2;
        const float tap0 = bf16_to_float(taps[0]), tap1 = bf16_to_float(taps[1]);
        merged[0][s][e] = float_to_bf16(a1 * tap1);
        merged[1][s][e] = float_to_bf16(fmaf(a0, tap1, a1 * tap0));
        merged[2][s][e] = float_to_bf16(a0 * tap0);
      }
  }
  for (int tile = work.first; tile < work.last; ++tile) {
    // Each thread: two chunks of 8 channels of a row, for each distance.
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int local = int(threadIdx.x) / 16 + 16 * half, chunk = int(threadIdx.x) % 16;
      const EarlyRow row(tile * kTile + local, all, early, p);
#pragma unroll
      for (int distance = 0; distance < 3; ++distance) {
        bf16x8 v = {};
        if (row.seen_from(distance, starts, p)) v = load16(dy + (row.flat(p) + int64_t(distance) * batch) * channels + head * kHeadDim + 8 * chunk);
        ahead[distance * kTile * kRowChunks + dy_chunk_at(local, chunk)] = v;
      }
    }
    block_sync_lds();  // dy is written, and dz of the tile before is read
    f32x16 acc = {};
#pragma unroll
    for (int distance = 0; distance < 3; ++distance) {
#pragma unroll
      for (int s = 0; s < 8; ++s) {
        if (s % 4 == 0) HO_NO_FURTHER();
        const bf16x8 rows_of_dy = ahead[distance * kTile * kRowChunks + dy_chunk_at(lane % 32, 2 * s + lane / 32)];
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          bf16x4 a, b;
#pragma unroll
          for (int e = 0; e < 4; ++e) a[e] = merged[distance][s][4 * half + e], b[e] = rows_of_dy[4 * half + e];
          acc = mfma_32x32x8(a, b, acc);
        }
      }
    }
    // Two waves' channels at a time through LDS, back to whole rows: 16 threads a row with four channels each.
#pragma unroll
    for (int part = 0; part < 2; ++part) {
      if (wave_id() / 2 == part) {
#pragma unroll
        for (int r = 0; r < 16; r += 4) {
          const f32x4 four = {acc[r], acc[r + 1], acc[r + 2], acc[r + 3]};
          const int row = lane % 32, chunk = (32 * (wave_id() % 2) + mfma_row<32>(lane, r)) / 4;
          dz[row * (kQuads / 2) + (chunk ^ (row % 8))] = four;
        }
      }
      block_sync_lds();  // half of dz is written
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int local = row_of_thread(i), quad = int(threadIdx.x) % 16, channel = part * (kHeadDim / 2) + 4 * quad;
        const EarlyRow row(tile * kTile + local, all, early, p);
        const f32x4 conv = dz[local * (kQuads / 2) + (quad ^ (local % 8))];
        float sum[4] = {conv[0], conv[1], conv[2], conv[3]};
        if (!row.live) continue;
        if (row.t < 0) {
          store4(d_halo + ((int64_t(row.chunk) * 2 + row.t + 2) * batch + row.entry) * channels + head * kHeadDim + channel, sum);
          continue;
        }
        const bf16* here = dy + row.flat(p) * channels + channel;
        const bf16x4 mine = load4(here + head * kHeadDim);
#pragma unroll
        for (int e = 0; e < 4; ++e) sum[e] = fmaf(0.5f, bf16_to_float(mine[e]), sum[e]);
        for (int k = 0; k < others; ++k) {
          const bf16x4 more = load4(here + (other + k) * kHeadDim);
#pragma unroll
          for (int e = 0; e < 4; ++e) sum[e] = fmaf(weight, bf16_to_float(more[e]), sum[e]);
        }
        store4(d_projected + row.flat(p) * width + head * kHeadDim + channel, sum);
      }
      block_sync_lds();  // half of dz is read, and dy
    }
  }
}

HO_EXPORT int64_t ho_cca_prologue_backward_blocks(int64_t total, int64_t heads, int64_t groups, int64_t processors) {
  return prologue_runs(groups, heads / groups + 2, (total + kTile - 1) / kTile, processors, 4);
}

// Of partial_bias [runs, N, d] and partial_temperature [runs, g]: runs as above. halo's and value_halo's gradients may be null.
HO_EXPORT int ho_cca_prologue_backward(const void* d_query, const void* d_key, const void* d_value, const void* query, const void* key,
                                       const void* inverse_norm, const void* temperature, const void* rope, const void* starts, const void* depthwise_weight,
                                       const void* grouped_weight, void* dy, void* d_projected, void* d_halo, void* d_value_halo, void* partial_bias,
                                       void* partial_temperature, int64_t q_row, int64_t q_batch, int64_t q_head, int64_t k_row, int64_t k_batch,
                                       int64_t k_head, int64_t v_row, int64_t v_batch, int64_t v_head, int64_t rope_row_stride, int64_t rope_batch_stride,
                                       int64_t total, int64_t rows, int64_t batch, int64_t heads, int64_t groups, int64_t rotary, int64_t delayed,
                                       int64_t processors, void* stream) {
  const int64_t all = total + (d_halo ? 2 * (total / max_of(rows, int64_t(1))) : 0);
  if (rotary % 8 || delayed % 4 || all > INT32_MAX - kTile) return -1;
  if (total == 0) return 0;
  const int64_t roles = heads / groups + 2, tiles = (total + kTile - 1) / kTile, input_tiles = (all + kTile - 1) / kTile;
  const int failed = ho_launch(
      ho_cca_prologue_backward_rows, dim3(unsigned(prologue_blocks(groups, roles, tiles, processors, 4))), dim3(kPrologueThreads), stream,
      static_cast<const bf16*>(d_query), static_cast<const bf16*>(d_key), static_cast<const bf16*>(d_value), static_cast<const bf16*>(query),
      static_cast<const bf16*>(key), static_cast<const float*>(inverse_norm), static_cast<const float*>(temperature), static_cast<const float*>(rope),
      static_cast<const uint8_t*>(starts), static_cast<bf16*>(dy), static_cast<bf16*>(d_projected), static_cast<bf16*>(d_value_halo),
      static_cast<float*>(partial_bias), static_cast<float*>(partial_temperature), q_row, q_batch, q_head, k_row, k_batch, k_head, v_row, v_batch, v_head,
      rope_row_stride, rope_batch_stride, int(total), int(rows), int(batch), int(heads), int(groups), int(rotary), int(delayed));
  if (failed) return failed;
  return ho_launch(ho_cca_prologue_backward_input, dim3(unsigned(prologue_blocks(groups, roles - 1, input_tiles, processors, 2))), dim3(kPrologueThreads),
                   stream, static_cast<const bf16*>(dy), static_cast<const bf16*>(depthwise_weight), static_cast<const bf16*>(grouped_weight),
                   static_cast<const uint8_t*>(starts), static_cast<bf16*>(d_projected), static_cast<bf16*>(d_halo), int(all), int(total), int(rows),
                   int(batch), int(heads), int(groups));
}
