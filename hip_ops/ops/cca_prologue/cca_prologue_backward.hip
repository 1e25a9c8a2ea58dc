// SPDX-License-Identifier: Apache-2.0
// Gradients of the CCA prologue in one pass over memory; cca_prologue_parameters.hip finishes those of the parameters.
//
//   load    a tile's rows of d_query or d_key and of query or key, of one head and of those it shares a mean with, and of z; the next
//           tile's loads run during the products of this one
//   dy      the gradient of x, without the convolutions: query and key are x's direction, and inverse_norm its length -> LDS, with the two
//           rows after the tile; the means' part of dz -> LDS; the sums over rows of dy and of the temperature's gradient stay in registers
//   dz_t    = M_0^T dy_t + M_1^T dy_{t+1} + M_2^T dy_{t+2}, for the rows that see row t, with the merged taps M_0 = a1 W1,
//           M_1 = a0 W1 + a1 W0, M_2 = a0 W0, which stay in the registers of the block, plus the means' part -> LDS, fp32 -> memory
//   S_j    += dy_{t+j} z_t^T, j = 0, 1, 2: 192 registers a lane -> partial [runs, N, 3, d, d] at the end
//
// A tile is kTile rows of one micro-batch entry that follow each other, so that only two rows of dy are computed twice. With halo, each
// chunk has rows -2 and -1 besides. A block has one head and a run of tiles; micro-batch entries of the same rows are adjacent. The
// blocks of a group take turns in copying the value channels of tiles. Two barriers a tile.
//
// LDS: dy has 256 bytes a row, chunk c of row r at c ^ (r % 8), and a row of zeros for rows that are not seen; dz as in cca_prologue.h; the
// operands of S are channels by rows, four rows of a channel together (8 bytes), as the MFMA takes them: see operand_at.
#include "cca_prologue_backward.h"

HO_KERNEL_REGISTERS(ho_cca_prologue_backward_pass, kPrologueThreads, 448)
(const bf16* d_query, const bf16* d_key, const bf16* d_value, const bf16* query, const bf16* key, const float* inverse_norm, const float* temperature,
 const float* rope, const bf16* projected, const bf16* halo, const bf16* depthwise_weight, const bf16* grouped_weight, const uint8_t* starts,
 bf16* d_projected, bf16* d_halo, bf16* d_value_halo, float* partial, float* partial_bias, float* partial_temperature, int q_row, int q_batch,
 int q_head, int k_row, int k_batch, int k_head, int v_row, int v_batch, int v_head, int row_stride, int batch_stride,
 int rope_row_stride, int rope_batch_stride, int tiles, int total, int rows, int batch, int heads, int groups, int rotary, int delayed) {
  HO_LDS(bf16x8, dy, (kZeroRow + 1) * kRowChunks);
  HO_LDS(f32x4, dz, kTile* kQuads);
  HO_LDS_BIG(bf16x4, operands, kOperands);  // dy of this row and of the next two, and z
  HO_LDS(int, row_at, 2 * kTile);                      // positions of the next two rows in dy
  split_scalars(d_query, d_key, query, key, inverse_norm, rope, projected, halo, starts, d_projected, d_halo, partial, partial_bias, partial_temperature, q_row,
                q_batch, q_head, k_row, k_batch, k_head, row_stride, batch_stride, rope_row_stride, rope_batch_stride, total, rows, batch, heads, groups, rotary);
  const BackwardPointers g = {d_query, d_key, d_value, query, key, inverse_norm, temperature, rope, projected, halo, depthwise_weight, grouped_weight,
                              starts, d_projected, d_halo, d_value_halo, partial, partial_bias, partial_temperature, q_row, q_batch, q_head, k_row,
                              k_batch, k_head, v_row, v_batch, v_head};
  const PrologueShape p = {row_stride, batch_stride, rope_row_stride, rope_batch_stride, total, rows, batch, heads, groups, rotary, delayed};
  const int per = heads / groups, early = halo ? 2 : 0, channels = channels_of(p), width = channels + groups * kHeadDim;
  Work work(p, per + 1, tiles);
  work.group = uniform(work.group), work.role = uniform(work.role), work.run = uniform(work.run), work.first = uniform(work.first), work.last = uniform(work.last);
  const bool is_key = work.role == per;
  const int head = uniform(is_key ? heads + work.group : work.group * per + work.role), other = uniform(is_key ? work.group * per : heads + work.group);
  const int others = is_key ? per : 1;
  const float weight = is_key ? 0.5f : 0.5f / float(per);
  const Source mine(head, g, p), theirs(other, g, p);
  const int wave = wave_id(), all_threads = int(threadIdx.x);
  const bool second_pair = wave >= 2;  // of the four operands of S

  // Addresses are computed in every iteration, because keeping them over the loop would take too many registers.
  const auto here = [&] {
    int thread = all_threads;
    forget_again(thread);
    return thread;
  };
  for (int number = work.first + (work.role + work.run) % (per + 1); number < work.last; number += per + 1) give_values(Tile(number, early, p), work.group, here(), g, p);

  // Merged taps as the left operand: lane's input channel by eight output channels a step.
  bf16x8 merged[3][8];
  {
    const int lane = here() % kWave, into = 32 * wave + lane % 32;
    const float a0 = bf16_to_float(depthwise_weight[2 * (head * kHeadDim + into)]), a1 = bf16_to_float(depthwise_weight[2 * (head * kHeadDim + into) + 1]);
#pragma unroll
    for (int s = 0; s < 8; ++s) {
      if (s % 2 == 0) HO_NO_FURTHER();
#pragma unroll
      for (int e = 0; e < 8; ++e) {
        const bf16* taps = grouped_weight + (int64_t(head * kHeadDim + 16 * s + 8 * (lane / 32) + e) * kHeadDim + into) * 2;
        const float tap0 = bf16_to_float(taps[0]), tap1 = bf16_to_float(taps[1]);
        merged[0][s][e] = float_to_bf16(a1 * tap1);
        merged[1][s][e] = float_to_bf16(fmaf(a0, tap1, a1 * tap0));
        merged[2][s][e] = float_to_bf16(a0 * tap0);
      }
#pragma unroll
      for (int j = 0; j < 3; ++j) keep_packed(merged[j][s]);
    }
    HO_NO_FURTHER();
  }
  if (all_threads < kRowChunks) {
    const bf16x8 nothing = {};
    dy[dy_chunk_at(kZeroRow, all_threads)] = nothing;
  }

  RowOfHead own[2], of_other[2];
  bf16x8 z[4];  // of the second half of the threads; in the first wave the row after the tile, which needs no extra registers
  const auto load = [&](const Tile& tile, int thread) {
    const Quads quads(rotary, thread);
    const int chunk = thread % 16, quad = thread / 16 % kRowQuads, lane = thread % kWave;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      load_row(own[i], tile, row_of_thread(thread, i), mine, quads, p);
      load_row(of_other[i], tile, row_of_thread(thread, i), theirs, quads, p);
    }
    if (wave == 0) {
      RowOfHead behind;
      load_row(behind, tile, kTile + lane / 16 % kBehind, mine, quads, p);
      pack(z, behind);
    }
    if (second_pair) {
      const bf16* const here = projected + tile.number(p) * row_stride + int64_t(tile.entry) * batch_stride + head * kHeadDim;
#pragma unroll
      for (int i = 0; i < 4; ++i) z[i] = load_at<bf16x8>(here, tile.nearest(4 * quad + i, p) * unsigned(row_stride) + unsigned(8 * chunk));
      if (tile.first < 0 && quad == 0) {
#pragma unroll
        for (int i = 0; i < 2; ++i)
          z[i] = load_at<bf16x8>(halo + (int64_t(tile.chunk) * 2 * batch + tile.entry) * channels + head * kHeadDim, unsigned(i * batch) * unsigned(channels) + unsigned(8 * chunk));
      }
    }
  };

  f32x16 sums[3][4] = {};  // S: wave: 32 output channels; 4 x 32 input channels
  const auto keep_sums = [&] {
#pragma unroll
    for (int j = 0; j < 3; ++j)
#pragma unroll
      for (int n = 0; n < 4; ++n) keep_accumulating(sums[j][n]);
  };
  float bias[2][4] = {}, sum_along = 0.0f;
  Tile tile(work.first, early, p);
  if (work.first < work.last) load(tile, here());
  for (int number = work.first; number < work.last; ++number) {
    HO_NO_FURTHER();
    keep_sums();
    {
      const int thread = here(), lane = thread % kWave;
      const Quads quads(rotary, thread);
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        HO_NO_FURTHER();
        const int row = row_of_thread(thread, i);
        float mean[2][4] = {}, d[2][4];
#pragma unroll 1
        for (int k = 0; k < others; ++k) {  // query heads share their scale
          turned_gradient(d, of_other[i], theirs);
          if (k + 1 < others) {
            Source next = theirs;
            next.upstream += int64_t(k + 1) * g.q_head, next.out += (k + 1) * kHeadDim, next.inverse_norm += int64_t(k + 1) * p.total;
            const int again = here();
            load_row(of_other[i], tile, row_of_thread(again, i), next, Quads(rotary, again), p);
          }
#pragma unroll
          for (int q = 0; q < 2; ++q)
#pragma unroll
            for (int e = 0; e < 4; ++e) mean[q][e] = fmaf(weight, d[q][e], mean[q][e]);
        }
        const float along = turned_gradient(d, own[i], mine);
        if (tile.has(row, p)) sum_along += along;
#pragma unroll
        for (int q = 0; q < 2; ++q)
#pragma unroll
          for (int e = 0; e < 4; ++e) mean[q][e] = fmaf(0.5f, d[q][e], mean[q][e]);
        const Turn turn(tile, row, rope, quads, p);
        turn.back(d), turn.back(mean);
        write_dy(reinterpret_cast<bf16x4*>(dy), row, quads, d);
        // The thread has read this place of dz itself, for the previous tile.
#pragma unroll
        for (int q = 0; q < 2; ++q) {
          dz[chunk_at(row, (q ? quads.second : quads.first) / 4)] = f32x4{mean[q][0], mean[q][1], mean[q][2], mean[q][3]};
#pragma unroll
          for (int e = 0; e < 4; ++e) bias[q][e] += d[q][e];
        }
      }
      if (wave == 0) {
        const int row = kTile + lane / 16 % kBehind;  // both halves of the wave compute the same
        float d[2][4];
        RowOfHead behind;
        unpack(behind, z);
        turned_gradient(d, behind, mine);
        Turn(tile, row, rope, quads, p).back(d);
        if (lane < 32) write_dy(reinterpret_cast<bf16x4*>(dy), row, quads, d);
      }
      if (wave == 1 && lane < kTile) {
        // Rows that do not exist are zeros anyway; halo's flags are those of the rows -1 and 0.
        const bool hides_one = tile.starts_at(lane + 1, starts, p), hides_two = hides_one || tile.starts_at(lane + 2, starts, p);
        row_at[lane] = hides_one ? kZeroRow : lane + 1;
        row_at[kTile + lane] = hides_two ? kZeroRow : lane + 2;
      }
    }
    block_sync_lds();  // dy is written, and the previous tile's dz and operands are read

    HO_NO_FURTHER();
    {
      const int thread = here(), chunk = thread % 16, quad = thread / 16 % kRowQuads;  // eight channels of four rows
      bf16x8 of_dy[4];  // one of the two operands; z takes the other one
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int local = 4 * quad + i;
        of_dy[i] = dy[dy_chunk_at(second_pair ? row_at[kTile + local] : local, chunk)];
        if (!second_pair) z[i] = dy[dy_chunk_at(row_at[local], chunk)];
      }
      const auto write = [&](const bf16x8(&from)[4], int which) {
        HO_NO_FURTHER();
#pragma unroll
        for (int e = 0; e < 8; ++e) {
          const bf16x4 four = {from[0][e], from[1][e], from[2][e], from[3][e]};
          operands[(2 * (second_pair ? 1 : 0) + which) * kHeadDim * kRowQuads + operand_at(8 * chunk + e, quad)] = four;
        }
      };
      write(of_dy, 0), write(z, 1);
    }
    HO_NO_FURTHER();
    keep_sums();
    const Tile next = tile.after(early, p);
    if (number + 1 < work.last) load(next, here());
    HO_NO_FURTHER();

    {
      const int lane = here() % kWave;
      const int places[3] = {lane % 32, row_at[lane % 32], row_at[kTile + lane % 32]};
      f32x16 acc = {};
#pragma unroll
      for (int distance = 0; distance < 3; ++distance) {
#pragma unroll
        for (int s = 0; s < 8; ++s) {
          if (s % 2 == 0) HO_NO_FURTHER();
          const bf16x8 rows_of_dy = dy[dy_chunk_at(places[distance], 2 * s + lane / 32)];
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            bf16x4 a, b;
#pragma unroll
            for (int e = 0; e < 4; ++e) a[e] = merged[distance][s][4 * half + e], b[e] = rows_of_dy[4 * half + e];
            acc = mfma_32x32x8(a, b, acc);
          }
        }
      }
#pragma unroll
      for (int r = 0; r < 16; r += 4) {
        f32x4& place = dz[chunk_at(lane % 32, (32 * wave + mfma_row<32>(lane, r)) / 4)];
        const f32x4 mean = place;  // 0 before the chunk
        place = f32x4{acc[r] + mean[0], acc[r + 1] + mean[1], acc[r + 2] + mean[2], acc[r + 3] + mean[3]};
      }
    }
    block_sync_lds();  // dz and the operands are written, and dy is read

    const int thread = here(), lane = thread % kWave;
    const Quads quads(rotary, thread);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int row = row_of_thread(thread, i), t = tile.first + row;
      if (t >= rows) continue;
      // Rows of halo are those of the first tile of a chunk.
      bf16* to = d_projected + tile.flat(p) * width + head * kHeadDim;
      unsigned at = unsigned(row * batch) * unsigned(width);
      if (t < 0) to = d_halo + (int64_t(tile.chunk) * 2 * batch + tile.entry) * channels + head * kHeadDim, at = unsigned(row * batch) * unsigned(channels);
#pragma unroll
      for (int q = 0; q < 2; ++q) {
        const int channel = q ? quads.second : quads.first;
        const f32x4 sum = dz[chunk_at(row, channel / 4)];
        store4(to + (at + unsigned(channel)), {sum[0], sum[1], sum[2], sum[3]});
      }
    }
#pragma unroll
    for (int s = 0; s < kTile / 8; ++s) {
      HO_NO_FURTHER();
      const int rows_of_lane = 2 * s + lane / 32;
      bf16x4 a[3];
#pragma unroll
      for (int j = 0; j < 3; ++j) a[j] = operands[j * kHeadDim * kRowQuads + operand_at(32 * wave + lane % 32, rows_of_lane)];
#pragma unroll
      for (int n = 0; n < 4; ++n) {
        const bf16x4 b = operands[3 * kHeadDim * kRowQuads + operand_at(32 * n + lane % 32, rows_of_lane)];
#pragma unroll
        for (int j = 0; j < 3; ++j) sums[j][n] = mfma_32x32x8(a[j], b, sums[j][n]);
      }
    }
    tile = next;
  }
  const int lane = here() % kWave;
  float* const out = partial + (int64_t(work.run) * (heads + groups) + head) * 3 * kHeadDim * kHeadDim;
#pragma unroll
  for (int j = 0; j < 3; ++j)
#pragma unroll
    for (int n = 0; n < 4; ++n)
#pragma unroll
      for (int r = 0; r < 16; ++r) out[(j * kHeadDim + 32 * wave + mfma_row<32>(lane, r)) * kHeadDim + 32 * n + lane % 32] = sums[j][n][r];

  block_sync_lds();  // dz is read
  sum_over_rows(bias[0], dz), sum_over_rows(bias[1], dz);
  float along[4] = {sum_along, 0.0f, 0.0f, 0.0f};
  sum_over_rows(along, dz);
  if (all_threads >= 16) return;
  const Quads quads(rotary, here());
  float* const of_bias = partial_bias + (int64_t(work.run) * (heads + groups) + head) * kHeadDim;
  *reinterpret_cast<f32x4*>(of_bias + quads.first) = f32x4{bias[0][0], bias[0][1], bias[0][2], bias[0][3]};
  *reinterpret_cast<f32x4*>(of_bias + quads.second) = f32x4{bias[1][0], bias[1][1], bias[1][2], bias[1][3]};
  if (is_key && all_threads == 0) partial_temperature[work.run * groups + work.group] = along[0] * sqrtf(float(kHeadDim));
}

static int64_t backward_tiles(int64_t total, int64_t rows, int64_t batch, bool has_halo) {
  return rows && batch ? total / rows * ((rows + (has_halo ? 2 : 0) + kTile - 1) / kTile) : 0;
}

// The number of runs of a head's tiles, each with its partial sums.
HO_EXPORT int64_t ho_cca_prologue_backward_blocks(int64_t total, int64_t rows, int64_t batch, int64_t heads, int64_t groups, int64_t has_halo, int64_t processors) {
  return prologue_runs(groups, heads / groups + 1, backward_tiles(total, rows, batch, has_halo != 0), processors, 1);
}

// Fills d_projected, with halo d_halo and d_value_halo, partial [runs, N, 3, d, d], partial_bias [runs, N, d] and partial_temperature [runs, g].
HO_EXPORT int ho_cca_prologue_backward(const void* d_query, const void* d_key, const void* d_value, const void* query, const void* key,
                                       const void* inverse_norm, const void* temperature, const void* rope, const void* projected, const void* halo,
                                       const void* depthwise_weight, const void* grouped_weight, const void* starts, void* d_projected, void* d_halo,
                                       void* d_value_halo, void* partial, void* partial_bias, void* partial_temperature, int64_t q_row, int64_t q_batch,
                                       int64_t q_head, int64_t k_row, int64_t k_batch, int64_t k_head, int64_t v_row, int64_t v_batch, int64_t v_head,
                                       int64_t row_stride, int64_t batch_stride, int64_t rope_row_stride, int64_t rope_batch_stride, int64_t total,
                                       int64_t rows, int64_t batch, int64_t heads, int64_t groups, int64_t rotary, int64_t delayed, int64_t processors,
                                       void* stream) {
  const int64_t tiles = backward_tiles(total, rows, batch, halo != nullptr);
  // A tile's rows lie within 32 bits of its first.
  for (const int64_t stride : {q_row, k_row, v_row, row_stride, 2 * rope_row_stride, batch * (heads + 2 * groups) * kHeadDim})
    if (stride >= INT32_MAX / (2 * kTile)) return -1;
  for (const int64_t stride : {q_batch, q_head, k_batch, k_head, v_batch, v_head, batch_stride, rope_batch_stride})
    if (stride > INT32_MAX) return -1;
  if (rotary % 8 || delayed % 4 || tiles * kTile > INT32_MAX) return -1;
  if (tiles == 0) return 0;
  return ho_launch_lds(ho_cca_prologue_backward_pass, dim3(unsigned(prologue_blocks(groups, heads / groups + 1, tiles, processors, 1))),
                       dim3(kPrologueThreads), kOperands * sizeof(bf16x4), stream, static_cast<const bf16*>(d_query), static_cast<const bf16*>(d_key), static_cast<const bf16*>(d_value),
                   static_cast<const bf16*>(query), static_cast<const bf16*>(key), static_cast<const float*>(inverse_norm),
                   static_cast<const float*>(temperature), static_cast<const float*>(rope), static_cast<const bf16*>(projected),
                   static_cast<const bf16*>(halo), static_cast<const bf16*>(depthwise_weight), static_cast<const bf16*>(grouped_weight),
                   static_cast<const uint8_t*>(starts), static_cast<bf16*>(d_projected), static_cast<bf16*>(d_halo), static_cast<bf16*>(d_value_halo),
                   static_cast<float*>(partial), static_cast<float*>(partial_bias), static_cast<float*>(partial_temperature), int(q_row), int(q_batch),
                   int(q_head), int(k_row), int(k_batch), int(k_head), int(v_row), int(v_batch), int(v_head), int(row_stride), int(batch_stride),
                   int(rope_row_stride), int(rope_batch_stride), int(tiles), int(total), int(rows),
                   int(batch), int(heads), int(groups), int(rotary), int(delayed));
}
