// SPDX-License-Identifier: Apache-2.0
// Shared by the kernels of the CCA prologue: heads of 128 channels in bf16, and the layout of rows and channels on a block.
// Formulas and conventions: reference.py.
//
// Rows are numbered as in memory, [s, b]: row f is micro-batch entry f % batch at row t = f / batch % rows of its chunk. A tile is kTile such
// rows, so it may hold many short sequences. A block keeps its head's weights in registers while it loops over tiles.
//
// For global memory and for arithmetic on rows, a thread has two rows and eight channels of a head: four channels and the four
// that they rotate into. Eight neighbouring threads cover 64 bytes with each group of four, so all accesses are whole 64-byte pieces.
//
// LDS rows are 512 bytes, in chunks of 16 bytes: 4 channels of fp32, or 4 channels with both taps in bf16. Chunk c of row r sits at
// c ^ (r % 8): the eight lanes that the LDS serves at a time have different rows of one chunk, or eight chunks of one row or two.
//
// Blocks of one query group run on the same XCDs (round-robin dispatch), and a run of tiles stays on one XCD: its cache serves the data
// that the heads of a group share and the data that neighbouring tiles share.
#pragma once
#include "portable.h"

// HO_KERNEL whose registers leave room for `waves` waves a SIMD on AMD.
#if HO_HIP
#define HO_KERNEL_WAVES(name, threads, waves) extern "C" __global__ __launch_bounds__(threads, waves) void name
#else
#define HO_KERNEL_WAVES(name, threads, waves) HO_KERNEL(name, threads)
#endif

// Hides `raw` from the compiler, so that it converts again instead of keeping the result in twice as many registers over the loop.
template <class T> __device__ __forceinline__ void forget(T& raw) {
#if HO_HIP
  asm("" : "+v"(raw));
#endif
}

// As above, and volatile: values derived from `raw` are neither shared with other code nor kept over a loop.
__device__ __forceinline__ void forget_again(int& raw) {
#if HO_HIP
  asm volatile("" : "+v"(raw));
#endif
}

// Puts a value that is the same in all lanes into a scalar register; the compiler need not prove that.
__device__ __forceinline__ int uniform(int v) {
#if defined(__HIP_DEVICE_COMPILE__)
  return __builtin_amdgcn_readfirstlane(v);
#else
  return v;
#endif
}

// Keeps the compiler from moving loads further ahead than the registers allow.
#if defined(__HIP_DEVICE_COMPILE__)
#define HO_NO_FURTHER() __builtin_amdgcn_sched_barrier(0)
#else
#define HO_NO_FURTHER()
#endif

constexpr int kHeadDim = 128, kTile = 32, kPrologueThreads = 256, kXcds = 8;
constexpr int kQuads = kHeadDim / 4;  // chunks of a row in LDS
constexpr float kLeastTemperature = 1e-30f;           // below it, keys have lost their direction
constexpr float kPrologueEps = 1.1920928955078125e-07f;  // of fp32; smallest length that is divided out

struct PrologueShape {
  int64_t row_stride, batch_stride;            // of projected, in elements
  int64_t rope_row_stride, rope_batch_stride;  // of rope
  int total, rows, batch;                      // flat rows; rows of a sequence; micro batch
  int heads, groups;                           // query heads and query groups
  int rotary, delayed;                         // channels that rotate (with rope); value channels that lag
};

__device__ __forceinline__ int channels_of(const PrologueShape& p) { return (p.heads + p.groups) * kHeadDim; }

// One flat row.
struct Row {
  int t, entry, chunk;
  int64_t number;   // of [s]
  bool live;

  __device__ __forceinline__ Row(int f, const PrologueShape& p) {
    live = f < p.total;
    const int at = live ? f : 0, step = at / p.batch;
    entry = at - step * p.batch;
    chunk = step / p.rows;
    t = step - chunk * p.rows;
    number = step;
  }
  // Index of [s, b].
  __device__ __forceinline__ int64_t flat(const PrologueShape& p) const { return number * p.batch + entry; }
  // Not 0 where a document starts at row t + step; starts is [k, rows + 1, b] and begins with row -1.
  __device__ __forceinline__ int starts_at(const uint8_t* starts, int step, const PrologueShape& p) const {
    int first = 0;
    if (starts) first = starts[(int64_t(chunk) * (p.rows + 1) + t + step + 1) * p.batch + entry];
    return first;
  }
};

// The thread's two groups of four channels of a head.
struct Quads {
  int first, second;
  __device__ __forceinline__ Quads(int rotary, int thread) {
    const int quad = thread % 16 * 4, half = rotary / 2;
    first = quad < half ? quad : quad + half;
    second = quad + (quad < half ? half : kHeadDim / 2);
  }
};

__device__ __forceinline__ int row_of_thread(int thread, int i) { return thread / 16 * 2 + i; }

__device__ __forceinline__ bf16x4 load4(const bf16* p) { return *reinterpret_cast<const bf16x4*>(p); }

__device__ __forceinline__ void store4(bf16* p, const float (&v)[4]) {
  bf16x4 out;
#pragma unroll
  for (int e = 0; e < 4; ++e) out[e] = float_to_bf16(v[e]);
  *reinterpret_cast<bf16x4*>(p) = out;
}

// The position of chunk `chunk` of row `row` in LDS, in chunks.
__device__ __forceinline__ int chunk_at(int row, int chunk) { return row * kQuads + (chunk ^ (row % 8)); }

// A block's work: head `role` of a group (its query heads, its key head, then its value head) on tiles first .. last - 1.
struct Work {
  int group, role, first, last;
  int run, runs;  // blocks with the same head

  // Grid: kXcds * slots blocks, block b on XCD b % kXcds. Groups get the XCDs in turn where the numbers divide.
  __device__ __forceinline__ Work(const PrologueShape& p, int roles, int tiles) {
    const bool dealt = kXcds % p.groups == 0;
    const int block = int(blockIdx.x), xcd = block % kXcds, slot = block / kXcds;
    const int all_roles = dealt ? roles : roles * p.groups, runs_a_place = int(gridDim.x) / kXcds / all_roles;
    const int places = dealt ? kXcds / p.groups : kXcds, place = dealt ? xcd / p.groups : xcd;
    const int which = slot % all_roles;
    group = dealt ? xcd % p.groups : which / roles;
    role = dealt ? which : which % roles;
    run = place * runs_a_place + slot / all_roles, runs = places * runs_a_place;
    first = int(int64_t(run) * tiles / runs), last = int((int64_t(run) + 1) * tiles / runs);
  }
};

// The number of runs of tiles of a head, for `resident` blocks per compute unit in all; a multiple of the XCDs of its group.
inline int64_t prologue_runs(int64_t groups, int64_t roles, int64_t tiles, int64_t processors, int64_t resident) {
  const bool dealt = kXcds % groups == 0;
  const int64_t all_roles = dealt ? roles : roles * groups, places = dealt ? kXcds / groups : kXcds;
  return places * max_of(int64_t(1), min_of(processors * resident / kXcds / all_roles, (tiles + places - 1) / places));
}

inline int64_t prologue_blocks(int64_t groups, int64_t roles, int64_t tiles, int64_t processors, int64_t resident) {
  return prologue_runs(groups, roles, tiles, processors, resident) * roles * groups;
}
