// SPDX-License-Identifier: Apache-2.0
// Stable sort of tokens by expert: a counting sort in two launches, without atomics. Tokens of no expert are a class after all experts, so that
// there are experts + 1 classes.
//
// A block has a segment of the tokens and a thread a piece of the segment, in order. Every thread counts its tokens in a column of LDS; prefix sums
// over the threads give each thread the place of its first token of a class within the block. The second launch adds up the first launch's counts
// of the earlier blocks.
#include "portable.h"

namespace expert_sort {

constexpr int kPiece = 32;       // columns that one thread sums
constexpr int kPadded = 34;      // and their distance in LDS, so that lanes on neighbouring pieces have no bank conflicts
constexpr int kMostBlocks = 64;  // unless a thread would have more than kMostTokens tokens; every block reads all counts
constexpr int kMostTokens = 128; // per thread; places within a block fit into 16 bits

template <int kThreads, int kClasses>
struct Columns {
  static constexpr int kPieces = kThreads / kPiece;
  uint16_t* counts;    // [kClasses][kPieces][kPadded]
  int* of_piece;       // [kClasses][kPieces]

  __device__ __forceinline__ uint16_t& at(int cls, int thread) {
    return counts[(cls * kPieces + thread / kPiece) * kPadded + thread % kPiece];
  }
};

__device__ __forceinline__ int class_of(const void* ids, bool wide, int64_t token, int experts) {
  const int64_t id = wide ? load_global(static_cast<const int64_t*>(ids) + token) : int64_t(load_global(static_cast<const int32_t*>(ids) + token));
  return id >= 0 && id < experts ? int(id) : experts;
}

// The thread's own tokens: [first, first + count).
struct Share {
  int64_t first;
  int count;
};
template <int kThreads>
__device__ __forceinline__ Share share_of(int64_t tokens, int tokens_a_thread) {
  const int64_t first = (int64_t(blockIdx.x) * kThreads + threadIdx.x) * tokens_a_thread;
  const int64_t left = tokens - first;
  return {first, left <= 0 ? 0 : left < tokens_a_thread ? int(left) : tokens_a_thread};
}

// Counts into each thread's column, then replaces each count by the sum of those before it in the piece, and computes the pieces' sums.
template <int kThreads, int kClasses>
__device__ __forceinline__ void count_columns(Columns<kThreads, kClasses>& c, const void* ids, bool wide, Share share, int experts) {
  const int thread = int(threadIdx.x);
  for (int cls = 0; cls <= experts; ++cls) c.at(cls, thread) = 0;
  for (int i = 0; i < share.count; ++i) ++c.at(class_of(ids, wide, share.first + i, experts), thread);
  block_sync_lds();
  for (int piece = thread; piece < (experts + 1) * c.kPieces; piece += kThreads) {
    uint16_t* const column = c.counts + piece * kPadded;
    int sum = 0;
#pragma unroll 8
    for (int i = 0; i < kPiece; ++i) {
      const int own = column[i];
      column[i] = uint16_t(sum);
      sum += own;
    }
    c.of_piece[piece] = sum;
  }
  block_sync_lds();
}

// counted[block][class]
template <int kThreads, int kClasses>
__device__ __forceinline__ void count_body(const void* ids, int wide, int* counted, int64_t tokens, int tokens_a_thread, int experts) {
  HO_LDS(uint16_t, counts, kClasses * kThreads / kPiece * kPadded);
  HO_LDS(int, of_piece, kClasses * kThreads / kPiece);
  Columns<kThreads, kClasses> c{counts, of_piece};
  count_columns(c, ids, wide != 0, share_of<kThreads>(tokens, tokens_a_thread), experts);
  for (int cls = threadIdx.x; cls <= experts; cls += kThreads) {
    int sum = 0;
#pragma unroll
    for (int piece = 0; piece < c.kPieces; ++piece) sum += c.of_piece[cls * c.kPieces + piece];
    counted[int64_t(blockIdx.x) * (experts + 1) + cls] = sum;
  }
}

template <int kThreads, int kClasses>
__device__ __forceinline__ void place_body(const void* ids, int wide, const int* __restrict__ counted, int32_t* __restrict__ token_of_row,
                                           int32_t* __restrict__ row_of_token, int32_t* __restrict__ counts_out,
                                           int32_t* __restrict__ offsets_out, int64_t tokens, int tokens_a_thread, int experts) {
  constexpr int kSlices = kThreads < kClasses ? 1 : kThreads / kClasses;  // threads that together add up the blocks of one class
  HO_LDS(uint16_t, counts, kClasses * kThreads / kPiece * kPadded);
  HO_LDS(int, of_piece, kClasses * kThreads / kPiece);
  HO_LDS(int, totals, kSlices * kClasses);
  HO_LDS(int, before, kSlices * kClasses);
  const int thread = int(threadIdx.x), classes = experts + 1, blocks = int(gridDim.x), block = int(blockIdx.x);

  for (int i = thread; i < kSlices * kClasses; i += kThreads) {
    const int cls = i % kClasses;
    int total = 0, earlier = 0;
    if (cls < classes) {
#pragma unroll 8
      for (int other = i / kClasses; other < blocks; other += kSlices) {
        const int found = counted[int64_t(other) * classes + cls];
        total += found;
        earlier += other < block ? found : 0;
      }
    }
    totals[i] = total;
    before[i] = earlier;
  }
  Columns<kThreads, kClasses> c{counts, of_piece};
  const Share share = share_of<kThreads>(tokens, tokens_a_thread);
  count_columns(c, ids, wide != 0, share, experts);

  // Computes in of_piece the row of each piece's first token of a class.
  for (int cls = thread; cls < classes; cls += kThreads) {
    int start = 0, own = 0, row = 0;
    for (int slice = 0; slice < kSlices; ++slice) {
#pragma unroll 8
      for (int other = 0; other < cls; ++other) start += totals[slice * kClasses + other];
      own += totals[slice * kClasses + cls];
      row += before[slice * kClasses + cls];
    }
    row += start;
    if (block == 0 && cls < experts) {
      counts_out[cls] = own;
      offsets_out[cls] = start + own;
    }
#pragma unroll
    for (int piece = 0; piece < c.kPieces; ++piece) {
      const int mine = c.of_piece[cls * c.kPieces + piece];
      c.of_piece[cls * c.kPieces + piece] = row;
      row += mine;
    }
  }
  block_sync_lds();

  for (int i = 0; i < share.count; ++i) {
    const int token = int(share.first) + i, cls = class_of(ids, wide != 0, token, experts);
    uint16_t& next = c.at(cls, thread);
    const int row = c.of_piece[cls * c.kPieces + thread / kPiece] + next;
    next = uint16_t(next + 1);
    row_of_token[token] = cls < experts ? row : ~row;
    token_of_row[row] = cls < experts ? token : ~token;
  }
}

// The smallest number of tokens per thread with at most kMostBlocks blocks.
inline int64_t tokens_a_thread(int64_t tokens, int64_t threads) {
  return min_of(int64_t(kMostTokens), max_of(int64_t(1), (tokens + kMostBlocks * threads - 1) / (kMostBlocks * threads)));
}

}  // namespace expert_sort

// Four waves for up to 32 experts, one for up to 256: LDS holds a column per thread.
#define EXPERT_SORT(experts, threads)                                                                                                \
  HO_KERNEL(ho_expert_count_##experts, threads)(const void* __restrict__ ids, int wide, int32_t* __restrict__ counted, int64_t tokens, \
                                                int tokens_a_thread, int num_experts) {                                              \
    expert_sort::count_body<threads, experts + 1>(ids, wide, counted, tokens, tokens_a_thread, num_experts);                         \
  }                                                                                                                                  \
  HO_KERNEL(ho_expert_place_##experts, threads)(const void* __restrict__ ids, int wide, const int32_t* __restrict__ counted,         \
                                                int32_t* __restrict__ token_of_row, int32_t* __restrict__ row_of_token,              \
                                                int32_t* __restrict__ counts, int32_t* __restrict__ offsets, int64_t tokens,         \
                                                int tokens_a_thread, int num_experts) {                                              \
    expert_sort::place_body<threads, experts + 1>(ids, wide, counted, token_of_row, row_of_token, counts, offsets, tokens,           \
                                                  tokens_a_thread, num_experts);                                                     \
  }
EXPERT_SORT(32, 256)
EXPERT_SORT(256, 64)

// The blocks of both launches; `counted` has [blocks][experts + 1] numbers. -1 where there is no variant.
HO_EXPORT int64_t ho_expert_sort_blocks(int64_t tokens, int64_t experts) {
  if (experts < 1 || experts > 256 || tokens > INT32_MAX) return -1;
  const int64_t threads = experts <= 32 ? 256 : 64, segment = threads * expert_sort::tokens_a_thread(tokens, threads);
  return (tokens + segment - 1) / segment;
}

// id_bytes: 4 or 8. Writes counts and offsets only if there are tokens.
HO_EXPORT int ho_expert_sort(const void* ids, void* counted, void* token_of_row, void* row_of_token, void* counts, void* offsets,
                             int64_t tokens, int64_t experts, int64_t id_bytes, void* stream) {
  const int64_t blocks = ho_expert_sort_blocks(tokens, experts);
  if (blocks < 0 || (id_bytes != 4 && id_bytes != 8)) return -1;
  const bool few = experts <= 32;
  const int64_t threads = few ? 256 : 64;
  const int share = int(expert_sort::tokens_a_thread(tokens, threads)), wide = id_bytes == 8;
  const dim3 grid{unsigned(blocks)}, block{unsigned(threads)};
  const int code = ho_launch(few ? ho_expert_count_32 : ho_expert_count_256, grid, block, stream, ids, wide, static_cast<int32_t*>(counted),
                             tokens, share, int(experts));
  if (code != 0) return code;
  return ho_launch(few ? ho_expert_place_32 : ho_expert_place_256, grid, block, stream, ids, wide, static_cast<const int32_t*>(counted),
                   static_cast<int32_t*>(token_of_row), static_cast<int32_t*>(row_of_token), static_cast<int32_t*>(counts),
                   static_cast<int32_t*>(offsets), tokens, share, int(experts));
}
