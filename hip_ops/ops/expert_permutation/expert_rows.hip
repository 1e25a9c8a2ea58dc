// SPDX-License-Identifier: Apache-2.0
// Moves rows along the maps of an order of tokens by expert. Padding rows (expert_permutation/reference.py) are not read; zeros are written in their
// place.
#include "row_vectors.h"

namespace rows {

template <class T, int kWidth>
struct CopyWork {
  const T* from;
  T* to;
  bool live;

  template <int kNow> __device__ __forceinline__ void run(int at) {
    constexpr int kStep = kWave * kWidth;
    Lane<T, kWidth> piece[kNow];
#pragma unroll
    for (int p = 0; p < kNow; ++p) {
      if (live) piece[p].read(from + at + p * kStep);
      else piece[p] = zeros<T, kWidth>();
    }
#pragma unroll
    for (int p = 0; p < kNow; ++p) piece[p].write(to + at + p * kStep);
  }
};

// out[i] = source[index[i]], and side_out[i] = side[index[i]] if side is not null; zeros where index[i] is negative.
template <class T, bool kAligned>
__device__ __forceinline__ void gather_body(const T* __restrict__ source, const int32_t* __restrict__ index, const void* __restrict__ side,
                                            T* __restrict__ out, void* __restrict__ side_out, int64_t count, int hidden,
                                            int64_t source_stride, int side_bytes) {
  constexpr int kWidth = kWidthOf<T, kAligned>, kPieces = 4;
  for (int64_t row = first_row(); row < count; row += row_step()) {
    const int entry = index[row];
    const bool live = entry >= 0;
    CopyWork<T, kWidth> work{source + (live ? entry * source_stride : 0), out + row * hidden, live};
    for_each_piece<kPieces, kWidth>(hidden, work);
    if (side && lane_id() == 0) {
      if (side_bytes == 4) static_cast<uint32_t*>(side_out)[row] = live ? static_cast<const uint32_t*>(side)[entry] : 0u;
      else static_cast<uint16_t*>(side_out)[row] = live ? static_cast<const uint16_t*>(side)[entry] : uint16_t(0);
    }
  }
}

}  // namespace rows

#define GATHER(name, T, aligned)                                                                                                    \
  HO_KERNEL(name, rows::kThreads)(const T* __restrict__ source, const int32_t* __restrict__ index, const void* __restrict__ side,   \
                                  T* __restrict__ out, void* __restrict__ side_out, int64_t count, int hidden,                      \
                                  int64_t source_stride, int side_bytes) {                                                          \
    rows::gather_body<T, aligned>(source, index, side, out, side_out, count, hidden, source_stride, side_bytes);                    \
  }
GATHER(ho_gather_rows_16, uint32_t, true)  // rows of 16-byte pieces, counted in words of 4
GATHER(ho_gather_rows_4, uint32_t, false)
GATHER(ho_gather_rows_2, uint16_t, false)

// Launchers. element_bytes: 2 or 4; aligned: every row of every tensor starts and ends at a multiple of 16 bytes; blocks: at most one
// per rows::kWaves rows; with fewer, a wave takes several rows.
HO_EXPORT int ho_gather_rows(const void* source, const void* index, const void* side, void* out, void* side_out, int64_t count,
                             int64_t hidden, int64_t source_stride, int64_t element_bytes, int64_t side_bytes, int64_t aligned,
                             int64_t blocks, void* stream) {
  if ((element_bytes != 2 && element_bytes != 4) || (side && side_bytes != 2 && side_bytes != 4) || hidden > INT32_MAX) return -1;
  const dim3 grid{unsigned(blocks)}, block(rows::kThreads);
  const int32_t* const map = static_cast<const int32_t*>(index);
  if (aligned || element_bytes == 4) {
    const int64_t words = element_bytes == 2 ? 2 : 1;
    return ho_launch(aligned ? ho_gather_rows_16 : ho_gather_rows_4, grid, block, stream, static_cast<const uint32_t*>(source), map, side,
                     static_cast<uint32_t*>(out), side_out, count, int(hidden / words), source_stride / words, int(side_bytes));
  }
  return ho_launch(ho_gather_rows_2, grid, block, stream, static_cast<const uint16_t*>(source), map, side, static_cast<uint16_t*>(out),
                   side_out, count, int(hidden), source_stride, int(side_bytes));
}
