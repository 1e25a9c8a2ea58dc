// SPDX-License-Identifier: Apache-2.0
// The CCA prologue forward: a block has one head and loops over tiles of 32 rows; cca_prologue.h describes the layout.
//
//   load    two rows per thread, each with the two before it, and the other heads' rows for the means; the next tile's loads run during the
//           products of this one
//   u       = both taps of the depthwise convolution -> LDS, in the order of the grouped weights in memory: channel, then tap
//   y       = weights x u by MFMA 32x32x8; a wave has 32 output channels, whose weights (16 KB) stay in its registers -> LDS, fp32
//   rows    mean, norm over 16 threads, temperature, rotation, store
//
// Two barriers a tile: u and y have their own LDS. A value head is a copy, its delayed channels from the row before.
#include "cca_prologue.h"

struct ForwardPointers {
  const bf16 *projected, *depthwise_weight, *depthwise_bias, *grouped_weight, *grouped_bias;
  const float* temperature;
  const float* rope;
  const bf16 *halo, *value_halo;
  const uint8_t* starts;
  bf16 *query, *key, *value;
  float* inverse_norm;
};

constexpr int kOthers = 2;  // heads that a mean takes at a time

// The two rows of a thread as loaded.
struct Loaded {
  bf16x4 z[2][3][2];      // row, how far back, quad
  bf16x4 other[2][kOthers][2];
  int near[2], far[2];    // not 0 where the row sees the previous row, and the two previous rows; numbers, because conditions would occupy scalar registers
};

struct Head {
  int channel, other, others;  // first channel in z; the first head of the mean's other part, and how many
  float weight;                // of each of them
  __device__ __forceinline__ Head(const PrologueShape& p, const Work& work) {
    const int per = p.heads / p.groups;
    const bool is_key = work.role == per;
    channel = (is_key ? p.heads + work.group : work.group * per + work.role) * kHeadDim;
    other = is_key ? work.group * per : p.heads + work.group;
    others = is_key ? per : 1;
    weight = is_key ? 0.5f / float(per) : 0.5f;
  }
};

// Every address exists, so that no load is in a branch: rows beyond the last read row 0, and values that a row does not see are masked later.
__device__ __forceinline__ void load_rows(Loaded& loaded, int tile, const ForwardPointers& g, const PrologueShape& p, const Head& head, const Quads& quads) {
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const Row row(tile * kTile + row_of_thread(int(threadIdx.x), i), p);
    const bf16* here = g.projected + row.number * p.row_stride + row.entry * p.batch_stride;
    const int has_halo = g.halo ? 1 : 0, hides_one = row.starts_at(g.starts, 0, p), hides_two = row.starts_at(g.starts, -1, p) | hides_one;
    loaded.near[i] = hides_one ? 0 : row.t >= 1 ? 1 : has_halo;
    loaded.far[i] = hides_two ? 0 : row.t >= 2 ? 1 : has_halo;
#pragma unroll
    for (int back = 0; back < 3; ++back) {
      const bf16* from = row.t >= back ? here - back * p.row_stride : here;
      if (back > 0 && g.halo && row.t < back) from = g.halo + ((int64_t(row.chunk) * 2 + (row.t - back + 2)) * p.batch + row.entry) * channels_of(p);
      loaded.z[i][back][0] = load4(from + head.channel + quads.first);
      loaded.z[i][back][1] = load4(from + head.channel + quads.second);
    }
#pragma unroll
    for (int k = 0; k < kOthers; ++k) {
      const bf16* of_other = here + (head.other + (k < head.others ? k : 0)) * kHeadDim;
      loaded.other[i][k][0] = load4(of_other + quads.first);
      loaded.other[i][k][1] = load4(of_other + quads.second);
    }
  }
}

// The taps of four channels of a row, in the order channel, tap.
__device__ __forceinline__ bf16x8 depthwise_taps(const bf16x4& z0, const bf16x4& z1, const bf16x4& z2, int near, int far, const bf16x8& weight,
                                                 const bf16x4& bias) {
  bf16x8 taps;
#pragma unroll
  for (int e = 0; e < 4; ++e) {
    const float one = near ? bf16_to_float(z1[e]) : 0.0f, two = far ? bf16_to_float(z2[e]) : 0.0f;
    const float a0 = bf16_to_float(weight[2 * e]), a1 = bf16_to_float(weight[2 * e + 1]), b0 = bf16_to_float(bias[e]);
    taps[2 * e] = float_to_bf16(fmaf(a0, two, fmaf(a1, one, b0)));
    taps[2 * e + 1] = float_to_bf16(fmaf(a0, one, fmaf(a1, bf16_to_float(z0[e]), b0)));
  }
  return taps;
}

__device__ __forceinline__ void mean_and_bias(float (&sum)[4], const Loaded& loaded, int i, int q, const bf16x4& bias, const Head& head) {
#pragma unroll
  for (int e = 0; e < 4; ++e) {
    float others = 0.0f;
#pragma unroll
    for (int k = 0; k < kOthers; ++k) others += k < head.others ? bf16_to_float(loaded.other[i][k][q][e]) : 0.0f;
    sum[e] = fmaf(head.weight, others, fmaf(0.5f, bf16_to_float(loaded.z[i][0][q][e]), bf16_to_float(bias[e])));
  }
}

// Of query heads beyond the first kOthers of a group.
__device__ __forceinline__ void add_others(float (&sum)[4], int f, int quad, const ForwardPointers& g, const PrologueShape& p, const Head& head) {
  const Row row(f, p);
  const bf16* from = g.projected + row.number * p.row_stride + row.entry * p.batch_stride + quad;
  for (int k = kOthers; k < head.others; ++k) {
    const bf16x4 more = load4(from + (head.other + k) * kHeadDim);
#pragma unroll
    for (int e = 0; e < 4; ++e) sum[e] = fmaf(head.weight, bf16_to_float(more[e]), sum[e]);
  }
}

__device__ __forceinline__ void shift_values(const Work& work, const ForwardPointers& g, const PrologueShape& p) {
  const int current = p.groups * kHeadDim - p.delayed;
  for (int tile = work.first; tile < work.last; ++tile) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const Row row(tile * kTile + row_of_thread(int(threadIdx.x), i), p);
      if (!row.live) continue;
      const bf16* here = g.projected + row.number * p.row_stride + row.entry * p.batch_stride + channels_of(p);
      const bool near = !row.starts_at(g.starts, 0, p);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int channel = work.group * kHeadDim + half * (kHeadDim / 2) + int(threadIdx.x) % 16 * 4;
        const bf16* from = here + channel;
        bf16x4 v = {};
        if (channel < current) v = load4(from);
        else if (near && row.t > 0) v = load4(from - p.row_stride);
        else if (near && g.value_halo) v = load4(g.value_halo + (int64_t(row.chunk) * p.batch + row.entry) * p.delayed + (channel - current));
        *reinterpret_cast<bf16x4*>(g.value + row.flat(p) * (p.groups * kHeadDim) + channel) = v;
      }
    }
  }
}

HO_KERNEL_WAVES(ho_cca_prologue_forward, kPrologueThreads, 2)
(const bf16* projected, const bf16* depthwise_weight, const bf16* depthwise_bias, const bf16* grouped_weight, const bf16* grouped_bias,
 const float* temperature, const float* rope, const bf16* halo, const bf16* value_halo, const uint8_t* starts, bf16* query, bf16* key, bf16* value,
 float* inverse_norm, int64_t row_stride, int64_t batch_stride, int64_t rope_row_stride, int64_t rope_batch_stride, int total, int rows, int batch,
 int heads, int groups, int rotary, int delayed) {
  HO_LDS(bf16x8, u, kTile * kQuads);
  HO_LDS(f32x4, y, kTile * kQuads);
  const ForwardPointers g = {projected, depthwise_weight, depthwise_bias, grouped_weight, grouped_bias, temperature, rope, halo, value_halo, starts, query, key, value, inverse_norm};
  const PrologueShape p = {row_stride, batch_stride, rope_row_stride, rope_batch_stride, total, rows, batch, heads, groups, rotary, delayed};
  const int per = heads / groups;
  const Work work(p, per + 2, (total + kTile - 1) / kTile);
  if (work.role > per) return shift_values(work, g, p);
  const Head head(p, work);
  const Quads quads(rotary, int(threadIdx.x));
  const int lane = lane_id(), column = 32 * wave_id();
  const bool is_key = work.role == per;
  const float scale = (is_key ? load_global(temperature + work.group) : 1.0f) * sqrtf(float(kHeadDim));

  bf16x8 weights[16];
#pragma unroll
  for (int s = 0; s < 16; ++s) weights[s] = load16(grouped_weight + (int64_t(head.channel + column + lane % 32) * kHeadDim * 2 + 16 * s + 8 * (lane / 32)));
  bf16x8 of_depthwise[2];
  bf16x4 bias_of_u[2], bias_of_y[2];
#pragma unroll
  for (int q = 0; q < 2; ++q) {
    const int channel = head.channel + (q ? quads.second : quads.first);
    of_depthwise[q] = load16(depthwise_weight + 2 * channel);
    bias_of_u[q] = load4(depthwise_bias + channel), bias_of_y[q] = load4(grouped_bias + channel);
  }
  bf16* const out = is_key ? key + work.group * kHeadDim : query + head.channel;
  const int64_t out_stride = int64_t(is_key ? groups : heads) * kHeadDim;

  Loaded next;
  if (work.first < work.last) load_rows(next, work.first, g, p, head, quads);
  for (int tile = work.first; tile < work.last; ++tile) {
    float past_conv[2][2][4];  // of x: the mean and the bias
#pragma unroll
    for (int q = 0; q < 2; ++q) forget(of_depthwise[q]), forget(bias_of_u[q]), forget(bias_of_y[q]);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
#pragma unroll
      for (int q = 0; q < 2; ++q) {
        const int quad = q ? quads.second : quads.first;
        u[chunk_at(row_of_thread(int(threadIdx.x), i), quad / 4)] =
            depthwise_taps(next.z[i][0][q], next.z[i][1][q], next.z[i][2][q], next.near[i], next.far[i], of_depthwise[q], bias_of_u[q]);
        mean_and_bias(past_conv[i][q], next, i, q, bias_of_y[q], head);
        if (head.others > kOthers) add_others(past_conv[i][q], tile * kTile + row_of_thread(int(threadIdx.x), i), quad, g, p, head);
      }
    }
    block_sync_lds();  // u is written, and the previous tile's y is read
    if (tile + 1 < work.last) load_rows(next, tile + 1, g, p, head, quads);
    f32x16 acc = {};
#pragma unroll
    for (int s = 0; s < 16; ++s) {
      if (s % 4 == 0) HO_NO_FURTHER();
      const bf16x8 rows_of_u = u[chunk_at(lane % 32, 2 * s + lane / 32)];
      acc = mfma_32x32x16(weights[s], rows_of_u, acc);
    }
#pragma unroll
    for (int r = 0; r < 16; r += 4) {
      const f32x4 four = {acc[r], acc[r + 1], acc[r + 2], acc[r + 3]};
      y[chunk_at(lane % 32, (column + mfma_row<32>(lane, r)) / 4)] = four;
    }
    block_sync_lds();  // y is written, and u is read
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const Row row(tile * kTile + row_of_thread(int(threadIdx.x), i), p);
      float x[2][4], square = 0.0f;
#pragma unroll
      for (int q = 0; q < 2; ++q) {
        const int quad = q ? quads.second : quads.first;
        const f32x4 of_y = y[chunk_at(row_of_thread(int(threadIdx.x), i), quad / 4)];
#pragma unroll
        for (int e = 0; e < 4; ++e) x[q][e] = of_y[e] + past_conv[i][q][e], square = fmaf(x[q][e], x[q][e], square);
      }
#pragma unroll
      for (int mask = 8; mask > 0; mask >>= 1) square += wave_xor(square, mask);  // over the 16 threads of the row
      const float inverse = rsqrtf(max_of(square, kPrologueEps * kPrologueEps));
      if (!row.live) continue;
      if (int(threadIdx.x) % 16 == 0) inverse_norm[int64_t(head.channel / kHeadDim) * total + row.flat(p)] = inverse;
#pragma unroll
      for (int e = 0; e < 4; ++e) x[0][e] *= inverse * scale, x[1][e] *= inverse * scale;
      if (rope && quads.first < rotary / 2) {
        const float* angle = rope + row.number * rope_row_stride + row.entry * rope_batch_stride + quads.first;
        const f32x4 cos = *reinterpret_cast<const f32x4*>(angle), sin = *reinterpret_cast<const f32x4*>(angle + rotary / 2);
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          const float one = x[0][e], two = x[1][e];
          x[0][e] = fmaf(one, cos[e], -two * sin[e]), x[1][e] = fmaf(two, cos[e], one * sin[e]);
        }
      }
      store4(out + row.flat(p) * out_stride + quads.first, x[0]);
      store4(out + row.flat(p) * out_stride + quads.second, x[1]);
    }
  }
}

// Pointers may be null: rope, halo with value_halo, starts. projected and rope have 16-byte aligned rows; rotary and delayed are multiples of 8 and 4.
HO_EXPORT int ho_cca_prologue(const void* projected, const void* depthwise_weight, const void* depthwise_bias, const void* grouped_weight,
                              const void* grouped_bias, const void* temperature, const void* rope, const void* halo, const void* value_halo,
                              const void* starts, void* query, void* key, void* value, void* inverse_norm, int64_t row_stride, int64_t batch_stride,
                              int64_t rope_row_stride, int64_t rope_batch_stride, int64_t total, int64_t rows, int64_t batch, int64_t heads,
                              int64_t groups, int64_t rotary, int64_t delayed, int64_t processors, void* stream) {
  if (rotary % 8 || delayed % 4 || total > INT32_MAX - kTile) return -1;
  const int64_t tiles = (total + kTile - 1) / kTile;
  if (tiles == 0) return 0;
  return ho_launch(ho_cca_prologue_forward, dim3(unsigned(prologue_blocks(groups, heads / groups + 2, tiles, processors, 2))), dim3(kPrologueThreads),
                   stream, static_cast<const bf16*>(projected), static_cast<const bf16*>(depthwise_weight), static_cast<const bf16*>(depthwise_bias),
                   static_cast<const bf16*>(grouped_weight), static_cast<const bf16*>(grouped_bias), static_cast<const float*>(temperature),
                   static_cast<const float*>(rope), static_cast<const bf16*>(halo), static_cast<const bf16*>(value_halo),
                   static_cast<const uint8_t*>(starts), static_cast<bf16*>(query), static_cast<bf16*>(key), static_cast<bf16*>(value),
                   static_cast<float*>(inverse_norm), row_stride, batch_stride, rope_row_stride, rope_batch_stride, int(total), int(rows), int(batch),
                   int(heads), int(groups), int(rotary), int(delayed));
}
