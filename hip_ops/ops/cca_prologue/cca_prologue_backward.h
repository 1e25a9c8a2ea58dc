// SPDX-License-Identifier: Apache-2.0
// The parts of the CCA prologue's backward: tiles, the computation of dy, and the value channels; cca_prologue_backward.hip has the kernels and
// describes the layout of tiles and LDS.
#pragma once
#include "cca_prologue.h"

constexpr int kBehind = 2, kZeroRow = kTile + kBehind;  // rows of dy in LDS beyond the tile's
constexpr int kRowChunks = kHeadDim / 8;                // 16-byte chunks of a row of dy
constexpr int kRowQuads = kTile / 4;                    // groups of four rows of a tile
constexpr int kOperand = kHeadDim * kRowQuads;          // of the sums' products, in units of 8 bytes

struct UpstreamPointers {
  const bf16 *d_query, *d_key, *query, *key;
  const float *inverse_norm, *temperature;
  int q_row, q_batch, q_head, k_row, k_batch, k_head;  // strides
};

template <class V, class T> __device__ __forceinline__ V load_at(const T* base, unsigned offset) {
  return *reinterpret_cast<const V*>(reinterpret_cast<const char*>(base) + uint64_t(offset * unsigned(sizeof(T))));
}

// Addresses are a tile's base, the same for all lanes, and an offset of 32 bits; rows that do not exist read the nearest existing row.
struct Tile {
  int chunk, entry, first;  // `first`: its first row in the chunk, negative in a halo

  __device__ __forceinline__ Tile(int tile, int early, const PrologueShape& p) {
    const int steps = (p.rows + early + kTile - 1) / kTile, at = tile / p.batch;
    entry = tile - at * p.batch;
    chunk = at / steps;
    first = (at - chunk * steps) * kTile - early;
  }
  __device__ __forceinline__ Tile after(int early, const PrologueShape& p) const {
    Tile tile = *this;
    if (++tile.entry == p.batch) tile.entry = 0, tile.first += kTile;
    if (tile.first >= p.rows) tile.first = -early, ++tile.chunk;
    return tile;
  }
  __device__ __forceinline__ bool has(int row, const PrologueShape& p) const { return first + row >= 0 && first + row < p.rows; }
  __device__ __forceinline__ unsigned nearest(int row, const PrologueShape& p) const {
    const int t = first + row, last = p.rows - 1;
    return unsigned((t < 0 ? 0 : t > last ? last : t) - first);
  }
  // Of the tile's first row in [s], and in [s, b].
  __device__ __forceinline__ int64_t number(const PrologueShape& p) const { return int64_t(chunk) * p.rows + first; }
  __device__ __forceinline__ int64_t flat(const PrologueShape& p) const { return number(p) * p.batch + entry; }
  // Whether a document starts at row t of the tile, for t >= -1 in the chunk; rows after the chunk take the flag of its last row.
  __device__ __forceinline__ bool starts_at(int row, const uint8_t* starts, const PrologueShape& p) const {
    if (!starts) return false;
    const int last = p.rows - 1 - first;
    const uint8_t* const flags = starts + (int64_t(chunk) * (p.rows + 1) + first + 1) * p.batch + entry;
    return load_at<uint8_t>(flags, unsigned(row < last ? row : last) * unsigned(p.batch));
  }
};

// The source of the gradient of a head's x.
struct Source {
  const bf16 *upstream, *out;
  const float* inverse_norm;
  int row_stride, batch_stride, out_stride;
  float to_unit, to_x;  // out * to_unit is the rotated direction of x; to_x is a factor beside inverse_norm

  __device__ __forceinline__ Source(int head, const UpstreamPointers& g, const PrologueShape& p) {
    const bool is_key = head >= p.heads;
    const int group = head - p.heads;
    const float root = sqrtf(float(kHeadDim)), length = is_key ? load_global(g.temperature + group) : 1.0f;
    upstream = is_key ? g.d_key + int64_t(group) * g.k_head : g.d_query + int64_t(head) * g.q_head;
    out = is_key ? g.key + group * kHeadDim : g.query + head * kHeadDim;
    inverse_norm = g.inverse_norm + int64_t(head) * p.total;
    row_stride = is_key ? g.k_row : g.q_row, batch_stride = is_key ? g.k_batch : g.q_batch;
    out_stride = (is_key ? p.groups : p.heads) * kHeadDim;
    to_unit = fabsf(length) < kLeastTemperature ? 0.0f : 1.0f / (length * root);
    to_x = length * root;
  }
};

// A thread's eight channels of one row.
struct RowOfHead {
  bf16x4 upstream[2], out[2];
  float inverse;  // 0 where there is no such row, and so no gradient
};

__device__ __forceinline__ void load_row(RowOfHead& loaded, const Tile& tile, int row, const Source& from, const Quads& quads, const PrologueShape& p) {
  const unsigned at = tile.nearest(row, p);
  const bf16* const upstream = from.upstream + tile.number(p) * from.row_stride + int64_t(tile.entry) * from.batch_stride;
  const bf16* const out = from.out + tile.flat(p) * from.out_stride;
  const unsigned of_upstream = at * unsigned(from.row_stride), of_out = at * unsigned(p.batch * from.out_stride);
#pragma unroll
  for (int q = 0; q < 2; ++q) {
    const unsigned channel = unsigned(q ? quads.second : quads.first);
    loaded.upstream[q] = load_at<bf16x4>(upstream, of_upstream + channel), loaded.out[q] = load_at<bf16x4>(out, of_out + channel);
  }
  const float inverse = load_at<float>(from.inverse_norm + tile.flat(p), at * unsigned(p.batch));
  loaded.inverse = tile.has(row, p) ? inverse : 0.0f;
}

// Computes the gradient of x in the rotated frame; returns upstream's component along x. All 16 threads of a row take part.
__device__ __forceinline__ float turned_gradient(float (&d)[2][4], const RowOfHead& row, const Source& from) {
  float along = 0.0f, unit[2][4];
#pragma unroll
  for (int q = 0; q < 2; ++q)
#pragma unroll
    for (int e = 0; e < 4; ++e) unit[q][e] = bf16_to_float(row.out[q][e]) * from.to_unit, along = fmaf(bf16_to_float(row.upstream[q][e]), unit[q][e], along);
#pragma unroll
  for (int mask = 8; mask > 0; mask >>= 1) along += wave_xor(along, mask);
  const float removed = row.inverse < 1.0f / kPrologueEps ? along : 0.0f, factor = row.inverse * from.to_x;
#pragma unroll
  for (int q = 0; q < 2; ++q)
#pragma unroll
    for (int e = 0; e < 4; ++e) d[q][e] = fmaf(-removed, unit[q][e], bf16_to_float(row.upstream[q][e])) * factor;
  return along;
}

// cos and sin of a thread's pairs in a row; 1 and 0 where they do not rotate.
struct Turn {
  f32x4 cos, sin;
  Turn() = default;
  __device__ __forceinline__ Turn(const Tile& tile, int row, const float* rope, const Quads& quads, const PrologueShape& p) {
    cos = f32x4{1.0f, 1.0f, 1.0f, 1.0f}, sin = f32x4{0.0f, 0.0f, 0.0f, 0.0f};
    if (rope && quads.first < p.rotary / 2) {
      const float* const angles = rope + tile.number(p) * p.rope_row_stride + tile.entry * p.rope_batch_stride;
      const unsigned at = tile.nearest(row, p) * unsigned(p.rope_row_stride) + unsigned(quads.first);
      cos = load_at<f32x4>(angles, at), sin = load_at<f32x4>(angles, at + unsigned(p.rotary / 2));
    }
  }
  __device__ __forceinline__ void back(float (&d)[2][4]) const {
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const float one = d[0][e], two = d[1][e];
      d[0][e] = fmaf(one, cos[e], two * sin[e]), d[1][e] = fmaf(two, cos[e], -one * sin[e]);
    }
  }
};

// Writes the value channels of a tile: a row's delayed channels get the gradient of the next row.
struct ValuePointers {
  const bf16* d_value;
  const uint8_t* starts;
  bf16 *d_projected, *d_value_halo;
  int row_stride, batch_stride, head_stride;

  __device__ __forceinline__ void write(const Tile& tile, int group, int thread, const PrologueShape& p) const {
    const int values = p.groups * kHeadDim, current = values - p.delayed, width = channels_of(p) + values;
    const bf16* const upstream = d_value + tile.number(p) * row_stride + int64_t(tile.entry) * batch_stride + int64_t(group) * head_stride;
    bf16* const out = d_projected + tile.flat(p) * width + channels_of(p);
#pragma unroll 1
    for (int piece = 0; piece < 4; ++piece) {
      const int row = row_of_thread(thread, piece / 2), t = tile.first + row, inside = piece % 2 * (kHeadDim / 2) + thread % 16 * 4;
      const int channel = group * kHeadDim + inside, from = row + (channel >= current ? 1 : 0);
      bf16x4 v = load_at<bf16x4>(upstream, tile.nearest(from, p) * unsigned(row_stride) + unsigned(inside));
      if (!tile.has(from, p) || (from > row && tile.starts_at(from, starts, p))) v = bf16x4{};
      if (tile.has(row, p)) *reinterpret_cast<bf16x4*>(out + int64_t(row) * p.batch * width + channel) = v;
      else if (t == -1 && from > row && d_value_halo) *reinterpret_cast<bf16x4*>(d_value_halo + (int64_t(tile.chunk) * p.batch + tile.entry) * p.delayed + channel - current) = v;
    }
  }
};

// Writes the places in dy of the rows one and two after each row of a tile: the row of zeros where they do not see it. Rows that do not exist are zeros
// anyway; halo's flags are those of the rows -1 and 0.
__device__ __forceinline__ void place_next_rows(int* row_at, int row, const Tile& tile, const uint8_t* starts, const PrologueShape& p) {
  const bool hides_one = tile.starts_at(row + 1, starts, p), hides_two = hides_one || tile.starts_at(row + 2, starts, p);
  row_at[row] = hides_one ? kZeroRow : row + 1;
  row_at[kTile + row] = hides_two ? kZeroRow : row + 2;
}

// Adds the values of the groups of 16 threads of a block for the same channels; the first 16 threads get the sum.
__device__ __forceinline__ void sum_over_rows(float (&sum)[4], f32x4* slots) {
  const f32x4 mine = {sum[0], sum[1], sum[2], sum[3]};
  slots[threadIdx.x] = mine;
  block_sync_lds();
  if (threadIdx.x < 16) {
#pragma unroll 1
    for (int group = 1; group < int(blockDim.x) / 16; ++group) {
      const f32x4 other = slots[group * 16 + threadIdx.x];
#pragma unroll
      for (int e = 0; e < 4; ++e) sum[e] += other[e];
    }
  }
  block_sync_lds();
}
