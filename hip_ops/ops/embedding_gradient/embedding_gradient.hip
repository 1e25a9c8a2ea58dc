// SPDX-License-Identifier: Apache-2.0
// Adds rows to the rows of a large matrix by their ids, in the order of the ids. A wave takes a run of kRun rows in that order and sums those of
// one id, in kWave lanes' columns. The sum of an id that begins and ends in the run is added to the matrix. The sum of an id that other runs share
// is stored as a partial sum, and the wave in whose run the id begins adds them. No atomics: every row of the matrix is read and written once.
// Conventions: reference.py. Sums are fp32.
#include "row_vectors.h"

namespace embedding {

using namespace rows;

constexpr int kRun = 32, kBatch = 4;  // rows per wave, and rows in flight

// The first of this lane's columns; it may be beyond the last column.
template <int kWidth>
__device__ __forceinline__ int first_column() {
  return ((int(blockIdx.y) * kWaves + wave_id()) * kWave + lane_id()) * kWidth;
}

// ids ascending, order: the row of each; heads, tails [runs, width]: partial sums of the run's first and last id that other runs share.
template <class T, int kWidth>
__device__ __forceinline__ void runs_body(float* __restrict__ total, const int64_t* __restrict__ ids, const int64_t* __restrict__ order,
                                          const T* __restrict__ values, float* __restrict__ heads, float* __restrict__ tails, int64_t count,
                                          int width, int64_t total_stride, int64_t stride) {
  const int column = first_column<kWidth>();
  if (column >= width) return;
  const int64_t start = int64_t(blockIdx.x) * kRun, end = min_of<int64_t>(start + kRun, count), of_run = int64_t(blockIdx.x) * width + column;
  int64_t id = load_global(ids + start);
  bool came_in = start > 0 && load_global(ids + start - 1) == id;
  Sums<kWidth> sums;
  sums.clear();
  for (int64_t at = start; at < end; at += kBatch) {
    Lane<T, kWidth> x[kBatch];
    int64_t following[kBatch];
#pragma unroll
    for (int p = 0; p < kBatch; ++p) {
      if (at + p < end) x[p].read(values + load_global(order + at + p) * stride + column);
      following[p] = at + p + 1 < count ? load_global(ids + at + p + 1) : -1;
    }
#pragma unroll
    for (int p = 0; p < kBatch; ++p) {
      if (at + p >= end) break;
      sums.add(x[p]);
      const bool ends = following[p] != id;
      if (!ends && at + p + 1 < end) continue;
      if (came_in) sums.write(heads + of_run);
      else if (ends) sums.add_to(total + id * total_stride + column);
      else sums.write(tails + of_run);
      came_in = false;
      sums.clear();
      id = following[p];
    }
  }
}

// The id that begins in this run and continues after it, if there is one.
template <int kWidth>
__device__ __forceinline__ void join_body(float* __restrict__ total, const int64_t* __restrict__ ids, const float* __restrict__ heads,
                                          const float* __restrict__ tails, int64_t count, int width, int64_t total_stride) {
  const int column = first_column<kWidth>();
  const int64_t run = blockIdx.x, start = run * kRun, end = start + kRun;
  if (column >= width || end >= count) return;
  const int64_t id = load_global(ids + end - 1);
  if (load_global(ids + end) != id || (start > 0 && load_global(ids + start - 1) == id)) return;
  Sums<kWidth> sums;
  sums.clear();
  sums.add_from(tails + run * width + column);
  // ids ascend, so if a run begins with this id, so do all runs between
  for (int64_t next = run + 1; next * kRun < count && load_global(ids + next * kRun) == id; ++next) sums.add_from(heads + next * width + column);
  sums.add_to(total + id * total_stride + column);
}

}  // namespace embedding

#define RUNS(name, T, aligned)                                                                                                           \
  HO_KERNEL(name, rows::kThreads)(float* __restrict__ total, const int64_t* __restrict__ ids, const int64_t* __restrict__ order,        \
                                  const T* __restrict__ values, float* __restrict__ heads, float* __restrict__ tails, int64_t count,    \
                                  int width, int64_t total_stride, int64_t stride) {                                         \
    embedding::runs_body<T, rows::kWidthOf<T, aligned>>(total, ids, order, values, heads, tails, count, width, total_stride, stride);           \
  }
RUNS(ho_add_runs_bf16, bf16, true)
RUNS(ho_add_runs_fp32, float, true)
RUNS(ho_add_runs_any_bf16, bf16, false)
RUNS(ho_add_runs_any_fp32, float, false)

#define JOIN(name, aligned)                                                                                                              \
  HO_KERNEL(name, rows::kThreads)(float* __restrict__ total, const int64_t* __restrict__ ids, const float* __restrict__ heads,          \
                                  const float* __restrict__ tails, int64_t count, int width, int64_t total_stride) {         \
    embedding::join_body<rows::kWidthOf<float, aligned>>(total, ids, heads, tails, count, width, total_stride);                          \
  }
JOIN(ho_join_runs, true)
JOIN(ho_join_runs_any, false)

HO_EXPORT int ho_add_rows_run() { return embedding::kRun; }

// element_bytes 2 (bf16) or 4 (fp32), of the rows; aligned: rows of all arrays start and end at multiples of 16 bytes. heads, tails: for every
// ho_add_rows_run() rows one of `width` floats.
HO_EXPORT int ho_add_rows(void* total, const void* ids, const void* order, const void* values, void* heads, void* tails, int64_t count, int64_t width,
                          int64_t total_stride, int64_t stride, int64_t element_bytes, int64_t aligned, void* stream) {
  if ((element_bytes != 2 && element_bytes != 4) || width > INT32_MAX) return -1;
  const auto grid = [&](int lane_width) {
    return dim3{unsigned((count + embedding::kRun - 1) / embedding::kRun), unsigned((width + rows::kThreads * lane_width - 1) / (rows::kThreads * lane_width))};
  };
  const dim3 block(rows::kThreads);
  float *const sums = static_cast<float*>(total), *const first = static_cast<float*>(heads), *const last = static_cast<float*>(tails);
  const int64_t *const in_order = static_cast<const int64_t*>(ids), *const places = static_cast<const int64_t*>(order);
  const int failed =
      element_bytes == 2 ? ho_launch(aligned ? ho_add_runs_bf16 : ho_add_runs_any_bf16, grid(aligned ? 8 : 1), block, stream, sums, in_order, places,
                                     static_cast<const bf16*>(values), first, last, count, int(width), total_stride, stride)
                         : ho_launch(aligned ? ho_add_runs_fp32 : ho_add_runs_any_fp32, grid(aligned ? 4 : 1), block, stream, sums, in_order, places,
                                     static_cast<const float*>(values), first, last, count, int(width), total_stride, stride);
  if (failed) return failed;
  return ho_launch(aligned ? ho_join_runs : ho_join_runs_any, grid(aligned ? 4 : 1), block, stream, sums, in_order, static_cast<const float*>(first),
                   static_cast<const float*>(last), count, int(width), total_stride);
}
