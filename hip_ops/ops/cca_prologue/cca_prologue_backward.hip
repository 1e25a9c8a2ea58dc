// SPDX-License-Identifier: Apache-2.0
// Gradients of the CCA prologue in two kernels, both with two waves a SIMD; cca_prologue_parameters.hip finishes those of the parameters.
//
//   weights  load    a tile's rows of d_query or d_key, of query or key and of z, of one head; the next tile's loads run during the products of
//                    this one
//            dy      the gradient of x, without the convolutions: query and key are x's direction, and inverse_norm its length -> LDS and memory,
//                    with the two rows after the tile; the sums over rows of dy and of the temperature's gradient stay in registers
//            S_j    += dy_{t+j} z_t^T, j = 0, 1, 2, for the rows that see row t: 96 registers a lane -> partial [runs, N, 3, d, d] at the end
//   input    load    a tile's rows of dy, of one head and of those it shares a mean with
//            dz_t    = M_0^T dy_t + M_1^T dy_{t+1} + M_2^T dy_{t+2}, with the merged taps M_0 = a1 W1, M_1 = a0 W1 + a1 W0, M_2 = a0 W0,
//                    which stay in the registers of the block -> LDS, fp32; plus the means' part -> memory
//
// The heads that share a mean read each other's dy, so it is computed once a head, before all of dz. A tile is kTile rows of one micro-batch entry
// that follow each other, so that only two rows of dy are computed twice. With halo, each chunk has rows -2 and -1 besides. A block has one head and
// a run of tiles; micro-batch entries of the same rows are adjacent. In `input` the blocks of a group take turns in copying the value channels of
// tiles. Two barriers a tile.
//
// LDS: dy has 256 bytes a row, in chunks of 16, and a row of zeros for rows that are not seen. Eight lanes read one chunk of eight rows in `input`
// (chunk c of row r at c ^ r % 8), and half of the chunks of one row and the other half of another in `weights` (c ^ c / 8 * 4, for its writes of
// rotating pairs). dz as in cca_prologue.h. The operands of S are channels by rows, four rows of a channel together (8 bytes), as the MFMA takes
// them: see operand_at.
#include "cca_prologue_backward.h"

constexpr int kWeightThreads = 512;

// The position of group `quad` of four rows of a channel, in units of 8 bytes. Sixteen lanes write a unit of 16 chunks of channels, and read the units
// of 16 neighbouring channels: both have the 32 banks once.
__device__ __forceinline__ int operand_at(int channel, int quad) {
  const int chunk = channel / 8, inside = channel % 8;
  return ((chunk * 8 + (chunk & 1)) * kRowQuads + chunk / 2) ^ quad ^ inside * (kRowQuads + 1);
}

__device__ __forceinline__ int weights_dy_at(int row, int chunk) { return row * kRowChunks + (chunk ^ chunk / 8 * 4); }
__device__ __forceinline__ int input_dy_at(int row, int chunk) { return row * kRowChunks + (chunk ^ (row % 8)); }

// Writes eight channels of four rows.
__device__ __forceinline__ void write_operand(bf16x4* operand, const bf16x8 (&rows)[4], int chunk, int quad) {
#pragma unroll
  for (int e = 0; e < 8; ++e) {
    const bf16x4 four = {rows[0][e], rows[1][e], rows[2][e], rows[3][e]};
    operand[operand_at(8 * chunk + e, quad)] = four;
  }
}

HO_KERNEL_WAVES(ho_cca_prologue_backward_weights, kWeightThreads, 2)
(const bf16* d_query, const bf16* d_key, const bf16* query, const bf16* key, const float* inverse_norm, const float* temperature, const float* rope,
 const bf16* projected, const bf16* halo, const uint8_t* starts, bf16* all_dy, float* partial, float* partial_bias, float* partial_temperature, int q_row,
 int q_batch, int q_head, int k_row, int k_batch, int k_head, int row_stride, int batch_stride, int rope_row_stride, int rope_batch_stride, int tiles,
 int total, int rows, int batch, int heads, int groups, int rotary) {
  HO_LDS(bf16x8, dy, (kZeroRow + 1) * kRowChunks);
  HO_LDS_BIG(bf16x4, operands, 4 * kOperand);  // dy of a row, of the next two, and z
  HO_LDS(int, row_at, 2 * kTile);              // places of the next two rows in dy
  const PrologueShape p = {row_stride, batch_stride, rope_row_stride, rope_batch_stride, total, rows, batch, heads, groups, rotary, 0};
  const int per = heads / groups, early = halo ? 2 : 0, channels = channels_of(p);
  const Work work(p, per + 1, tiles);
  const bool is_key = work.role == per;
  const int head = uniform(is_key ? heads + work.group : work.group * per + work.role);
  const Source mine(head, {d_query, d_key, query, key, inverse_norm, temperature, q_row, q_batch, q_head, k_row, k_batch, k_head}, p);
  const int thread = int(threadIdx.x), lane = lane_id(), wave = wave_id(), operand = wave / 2;
  const int row = thread / 16, behind_row = kTile + lane / 16 % kBehind;  // of dy
  const int out_channel = 32 * (wave % 4), in_channel = kHeadDim / 2 * (wave / 4);  // the wave's part of S
  const Quads quads(rotary, thread);
  if (thread < kRowChunks) {
    const bf16x8 nothing = {};
    dy[weights_dy_at(kZeroRow, thread)] = nothing;
  }

  // Addresses in LDS are computed in every iteration, because keeping them over the loop would take too many registers.
  const auto fresh_thread = [&] {
    int fresh = thread;
    forget_again(fresh);
    return fresh & (kWeightThreads - 1);  // tells the compiler the range
  };

  RowOfHead own, behind;  // behind: of one wave
  Turn turn;
  bf16x8 z[4];  // of the last operand's waves
  const auto load = [&](const Tile& tile) {
    load_row(own, tile, row, mine, quads, p);
    turn = Turn(tile, row, rope, quads, p);
    if (wave == 0) load_row(behind, tile, behind_row, mine, quads, p);
    if (operand == 3) {
      const int fresh = fresh_thread(), chunk = fresh % 16, quad = fresh / 16 % kRowQuads;
      const bf16* const from = projected + tile.number(p) * row_stride + int64_t(tile.entry) * batch_stride + head * kHeadDim;
#pragma unroll
      for (int i = 0; i < 4; ++i) z[i] = load_at<bf16x8>(from, tile.nearest(4 * quad + i, p) * unsigned(row_stride) + unsigned(8 * chunk));
      if (tile.first < 0 && quad == 0) {
#pragma unroll
        for (int i = 0; i < 2; ++i)
          z[i] = load_at<bf16x8>(halo + (int64_t(tile.chunk) * 2 * batch + tile.entry) * channels + head * kHeadDim, unsigned(i * batch) * unsigned(channels) + unsigned(8 * chunk));
      }
    }
  };
  const auto give_dy = [&](const RowOfHead& from, const Turn& angles, int to, float (&d)[2][4]) {
    const float along = turned_gradient(d, from, mine);
    angles.back(d);
#pragma unroll
    for (int q = 0; q < 2; ++q) {
      const int channel = q ? quads.second : quads.first;
      bf16x4 four;
#pragma unroll
      for (int e = 0; e < 4; ++e) four[e] = float_to_bf16(d[q][e]);
      reinterpret_cast<bf16x4*>(dy)[2 * weights_dy_at(to, channel / 8) + channel / 4 % 2] = four;
    }
    return along;
  };

  f32x16 sums[3][2] = {};  // S: 32 output by 2 x 32 input channels
  float bias[2][4] = {}, sum_along = 0.0f;
  Tile tile(work.first, early, p);
  if (work.first < work.last) load(tile);
  for (int number = work.first; number < work.last; ++number) {
    float d[2][4];
    const float along = give_dy(own, turn, row, d);
    if (tile.has(row, p)) sum_along += along;
#pragma unroll
    for (int q = 0; q < 2; ++q)
#pragma unroll
      for (int e = 0; e < 4; ++e) bias[q][e] += d[q][e];
    if (wave == 0) give_dy(behind, Turn(tile, behind_row, rope, quads, p), behind_row, d);  // both halves of the wave compute and write the same
    if (wave == 1 && lane < kTile) place_next_rows(row_at, lane, tile, starts, p);
    block_sync_lds();  // dy is written, and the previous tile's operands are read

    const int fresh = fresh_thread(), chunk = fresh % 16, quad = fresh / 16 % kRowQuads;  // eight channels of four rows, of an operand
    if (operand < 3) {
      bf16x8 of_dy[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int local = 4 * quad + i;
        of_dy[i] = dy[weights_dy_at(operand == 0 ? local : row_at[(operand - 1) * kTile + local], chunk)];
        if (operand == 0 && tile.has(local, p)) store16(all_dy + (tile.flat(p) + int64_t(local) * batch) * channels + head * kHeadDim + 8 * chunk, of_dy[i]);
      }
      write_operand(operands + operand * kOperand, of_dy, chunk, quad);
    } else {
      write_operand(operands + 3 * kOperand, z, chunk, quad);
    }
    tile = tile.after(early, p);
    if (number + 1 < work.last) load(tile);
    block_sync_lds();  // the operands are written, and dy is read

#pragma unroll
    for (int s = 0; s < kTile / 8; ++s) {
      const int rows_of_lane = 2 * s + lane / 32;
      bf16x4 a[3];
#pragma unroll
      for (int j = 0; j < 3; ++j) a[j] = operands[j * kOperand + operand_at(out_channel + lane % 32, rows_of_lane)];
#pragma unroll
      for (int n = 0; n < 2; ++n) {
        const bf16x4 b = operands[3 * kOperand + operand_at(in_channel + 32 * n + lane % 32, rows_of_lane)];
#pragma unroll
        for (int j = 0; j < 3; ++j) sums[j][n] = mfma_32x32x8(a[j], b, sums[j][n]);
      }
    }
  }
  float* const out = partial + (int64_t(work.run) * (heads + groups) + head) * 3 * kHeadDim * kHeadDim;
#pragma unroll
  for (int j = 0; j < 3; ++j)
#pragma unroll
    for (int n = 0; n < 2; ++n)
#pragma unroll
      for (int r = 0; r < 16; ++r) out[(j * kHeadDim + out_channel + mfma_row<32>(lane, r)) * kHeadDim + in_channel + 32 * n + lane % 32] = sums[j][n][r];

  block_sync_lds();  // the operands are read
  f32x4* const slots = reinterpret_cast<f32x4*>(operands);
  sum_over_rows(bias[0], slots), sum_over_rows(bias[1], slots);
  float along[4] = {sum_along, 0.0f, 0.0f, 0.0f};
  sum_over_rows(along, slots);
  if (thread >= 16) return;
  float* const of_bias = partial_bias + (int64_t(work.run) * (heads + groups) + head) * kHeadDim;
  *reinterpret_cast<f32x4*>(of_bias + quads.first) = f32x4{bias[0][0], bias[0][1], bias[0][2], bias[0][3]};
  *reinterpret_cast<f32x4*>(of_bias + quads.second) = f32x4{bias[1][0], bias[1][1], bias[1][2], bias[1][3]};
  if (is_key && thread == 0) partial_temperature[work.run * groups + work.group] = along[0] * sqrtf(float(kHeadDim));
}

HO_KERNEL_WAVES(ho_cca_prologue_backward_input, kPrologueThreads, 2)
(const bf16* all_dy, const bf16* d_value, const bf16* depthwise_weight, const bf16* grouped_weight, const uint8_t* starts, bf16* d_projected, bf16* d_halo,
 bf16* d_value_halo, int v_row, int v_batch, int v_head, int tiles, int total, int rows, int batch, int heads, int groups, int delayed) {
  HO_LDS(bf16x8, dy, (kZeroRow + 1) * kRowChunks);
  HO_LDS(f32x4, dz, kTile* kQuads);
  HO_LDS(int, row_at, 2 * kTile);  // places of the next two rows in dy
  const PrologueShape p = {0, 0, 0, 0, total, rows, batch, heads, groups, 0, delayed};
  const int per = heads / groups, early = d_halo ? 2 : 0, channels = channels_of(p), width = channels + groups * kHeadDim;
  const Work work(p, per + 1, tiles);
  const bool is_key = work.role == per;
  const int head = uniform(is_key ? heads + work.group : work.group * per + work.role), other = uniform(is_key ? work.group * per : heads + work.group);
  const int others = is_key ? per : 1;
  const float weight = is_key ? 0.5f : 0.5f / float(per);
  const int thread = int(threadIdx.x), lane = lane_id(), wave = wave_id(), row = thread / 16, chunk = thread % 16;  // and row + kTile / 2
  const ValuePointers values = {d_value, starts, d_projected, d_value_halo, v_row, v_batch, v_head};
  for (int number = work.first + (work.role + work.run) % (per + 1); number < work.last; number += per + 1) values.write(Tile(number, early, p), work.group, thread, p);

  // Merged taps as the left operand: lane's input channel by eight output channels a step.
  bf16x8 merged[3][8];
  {
    const int into = 32 * wave + lane % 32;
    const float a0 = bf16_to_float(depthwise_weight[2 * (head * kHeadDim + into)]), a1 = bf16_to_float(depthwise_weight[2 * (head * kHeadDim + into) + 1]);
#pragma unroll
    for (int s = 0; s < 8; ++s) {
#pragma unroll
      for (int e = 0; e < 8; ++e) {
        const bf16* taps = grouped_weight + (int64_t(head * kHeadDim + 16 * s + 8 * (lane / 32) + e) * kHeadDim + into) * 2;
        const float tap0 = bf16_to_float(taps[0]), tap1 = bf16_to_float(taps[1]);
        merged[0][s][e] = float_to_bf16(a1 * tap1);
        merged[1][s][e] = float_to_bf16(fmaf(a0, tap1, a1 * tap0));
        merged[2][s][e] = float_to_bf16(a0 * tap0);
      }
    }
  }
  if (thread < kRowChunks) {
    const bf16x8 nothing = {};
    dy[input_dy_at(kZeroRow, thread)] = nothing;
  }

  bf16x8 own[2], of_other[2], behind;  // behind: of the first 32 threads
  const auto load_dy = [&](const Tile& tile, int local, int of_head) {
    return load_at<bf16x8>(all_dy + tile.flat(p) * channels + of_head * kHeadDim, tile.nearest(local, p) * unsigned(batch * channels) + unsigned(8 * chunk));
  };
  const auto load = [&](const Tile& tile) {
#pragma unroll
    for (int i = 0; i < 2; ++i) own[i] = load_dy(tile, row + kTile / 2 * i, head), of_other[i] = load_dy(tile, row + kTile / 2 * i, other);
    if (wave == 0) behind = load_dy(tile, kTile + row % kBehind, head);
  };

  Tile tile(work.first, early, p);
  if (work.first < work.last) load(tile);
  for (int number = work.first; number < work.last; ++number) {
    float mean[2][8];
    const bf16x8 nothing = {};
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int local = row + kTile / 2 * i;
      const bool exists = tile.has(local, p);
      dy[input_dy_at(local, chunk)] = exists ? own[i] : nothing;
#pragma unroll
      for (int e = 0; e < 8; ++e) mean[i][e] = bf16_to_float(of_other[i][e]);
#pragma unroll 1
      for (int k = 1; k < others; ++k) {
        const bf16x8 more = load_dy(tile, local, other + k);
#pragma unroll
        for (int e = 0; e < 8; ++e) mean[i][e] += bf16_to_float(more[e]);
      }
#pragma unroll
      for (int e = 0; e < 8; ++e) mean[i][e] = exists ? fmaf(weight, mean[i][e], 0.5f * bf16_to_float(own[i][e])) : 0.0f;
    }
    if (wave == 0 && lane < 16 * kBehind) dy[input_dy_at(kTile + row, chunk)] = tile.has(kTile + row, p) ? behind : nothing;
    if (wave == 1 && lane < kTile) place_next_rows(row_at, lane, tile, starts, p);
    block_sync_lds();  // dy is written, and the previous tile's dz is read

    const Tile next = tile.after(early, p);
    if (number + 1 < work.last) load(next);
    {
      const int places[3] = {lane % 32, row_at[lane % 32], row_at[kTile + lane % 32]};
      f32x16 acc = {};
#pragma unroll
      for (int distance = 0; distance < 3; ++distance) {
#pragma unroll
        for (int s = 0; s < 8; ++s) {
          acc = mfma_32x32x16(merged[distance][s], dy[input_dy_at(places[distance], 2 * s + lane / 32)], acc);
        }
      }
#pragma unroll
      for (int r = 0; r < 16; r += 4) dz[chunk_at(lane % 32, (32 * wave + mfma_row<32>(lane, r)) / 4)] = f32x4{acc[r], acc[r + 1], acc[r + 2], acc[r + 3]};
    }
    block_sync_lds();  // dz is written, and dy is read

#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int local = row + kTile / 2 * i, t = tile.first + local;
      if (t >= rows) continue;
      // Rows of halo are those of the first tile of a chunk.
      bf16* to = d_projected + tile.flat(p) * width + head * kHeadDim;
      unsigned at = unsigned(local * batch) * unsigned(width);
      if (t < 0) to = d_halo + (int64_t(tile.chunk) * 2 * batch + tile.entry) * channels + head * kHeadDim, at = unsigned(local * batch) * unsigned(channels);
      const f32x4 first = dz[chunk_at(local, 2 * chunk)], second = dz[chunk_at(local, 2 * chunk + 1)];
      bf16x8 sum;
#pragma unroll
      for (int e = 0; e < 8; ++e) sum[e] = float_to_bf16((e < 4 ? first[e % 4] : second[e % 4]) + mean[i][e]);
      *reinterpret_cast<bf16x8*>(to + (at + unsigned(8 * chunk))) = sum;
    }
    tile = next;
  }
}

static int64_t backward_tiles(int64_t total, int64_t rows, int64_t batch, bool has_halo) {
  return rows && batch ? total / rows * ((rows + (has_halo ? 2 : 0) + kTile - 1) / kTile) : 0;
}

// The number of runs of a head's tiles, each with its partial sums.
HO_EXPORT int64_t ho_cca_prologue_backward_blocks(int64_t total, int64_t rows, int64_t batch, int64_t heads, int64_t groups, int64_t has_halo, int64_t processors) {
  return prologue_runs(groups, heads / groups + 1, backward_tiles(total, rows, batch, has_halo != 0), processors, 1);
}

// Fills dy [s, b, N, d], d_projected, with halo d_halo and d_value_halo, partial [runs, N, 3, d, d], partial_bias [runs, N, d] and
// partial_temperature [runs, g].
HO_EXPORT int ho_cca_prologue_backward(const void* d_query, const void* d_key, const void* d_value, const void* query, const void* key,
                                       const void* inverse_norm, const void* temperature, const void* rope, const void* projected, const void* halo,
                                       const void* depthwise_weight, const void* grouped_weight, const void* starts, void* dy, void* d_projected,
                                       void* d_halo, void* d_value_halo, void* partial, void* partial_bias, void* partial_temperature, int64_t q_row,
                                       int64_t q_batch, int64_t q_head, int64_t k_row, int64_t k_batch, int64_t k_head, int64_t v_row, int64_t v_batch,
                                       int64_t v_head, int64_t row_stride, int64_t batch_stride, int64_t rope_row_stride, int64_t rope_batch_stride,
                                       int64_t total, int64_t rows, int64_t batch, int64_t heads, int64_t groups, int64_t rotary, int64_t delayed,
                                       int64_t processors, void* stream) {
  const int64_t tiles = backward_tiles(total, rows, batch, halo != nullptr);
  // A tile's rows lie within 32 bits of its first.
  for (const int64_t stride : {q_row, k_row, v_row, row_stride, 2 * rope_row_stride, batch * (heads + 2 * groups) * kHeadDim})
    if (stride >= INT32_MAX / (2 * kTile)) return -1;
  for (const int64_t stride : {q_batch, q_head, k_batch, k_head, v_batch, v_head, batch_stride, rope_batch_stride})
    if (stride > INT32_MAX) return -1;
  if (rotary % 8 || delayed % 4 || tiles * kTile > INT32_MAX) return -1;
  if (tiles == 0) return 0;
  const int64_t roles = heads / groups + 1;
  const int failed = ho_launch_lds(
      ho_cca_prologue_backward_weights, dim3(unsigned(prologue_blocks(groups, roles, tiles, processors, 1))), dim3(kWeightThreads),
      4 * kOperand * sizeof(bf16x4), stream, static_cast<const bf16*>(d_query), static_cast<const bf16*>(d_key), static_cast<const bf16*>(query),
      static_cast<const bf16*>(key), static_cast<const float*>(inverse_norm), static_cast<const float*>(temperature), static_cast<const float*>(rope),
      static_cast<const bf16*>(projected), static_cast<const bf16*>(halo), static_cast<const uint8_t*>(starts), static_cast<bf16*>(dy),
      static_cast<float*>(partial), static_cast<float*>(partial_bias), static_cast<float*>(partial_temperature), int(q_row), int(q_batch), int(q_head),
      int(k_row), int(k_batch), int(k_head), int(row_stride), int(batch_stride), int(rope_row_stride), int(rope_batch_stride), int(tiles), int(total),
      int(rows), int(batch), int(heads), int(groups), int(rotary));
  if (failed) return failed;
  return ho_launch(ho_cca_prologue_backward_input, dim3(unsigned(prologue_blocks(groups, roles, tiles, processors, 2))), dim3(kPrologueThreads), stream,
                   static_cast<const bf16*>(dy), static_cast<const bf16*>(d_value), static_cast<const bf16*>(depthwise_weight),
                   static_cast<const bf16*>(grouped_weight), static_cast<const uint8_t*>(starts), static_cast<bf16*>(d_projected),
                   static_cast<bf16*>(d_halo), static_cast<bf16*>(d_value_halo), int(v_row), int(v_batch), int(v_head), int(tiles), int(total),
                   int(rows), int(batch), int(heads), int(groups), int(delayed));
}
