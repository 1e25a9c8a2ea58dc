// SPDX-License-Identifier: Apache-2.0
// One output tile of  C = alpha * A * B^T + beta * D + gamma * I  for 16-bit A [m, k], B [n, k], D and C [m, n], fp32 accumulation.
//
// The waves of a block share a square tile in two rows of waves. Each owns accumulators of the 32x32x8 MFMA: 4 waves with 1 x 1 for a
// tile of 64, 2 x 2 for 128; 8 waves with 4 x 2 for 256, where reading the operands from LDS takes half the time of the MFMAs (128:
// three quarters). k advances in slabs of 32 through two LDS stages:
//
//   step s:  read the second half of slab s | MFMAs on the first half | registers (slab s+1) -> other stage | fetch slab s+3
//            barrier, LDS only                       <- the only one in a step; global loads stay in flight across it
//            read the first half of slab s+1 | MFMAs on the second half of slab s, which was read before the barrier
//
// so no MFMA waits for the barrier's own data, and a global load has two full steps to arrive (gfx942 has no 16-byte
// global-to-LDS copy, hence the registers in between).
//
// LDS rows are 32 elements (64 bytes) in four 16-byte chunks; chunk c of row r sits at c ^ ((r/2) % 4). Then the eight lanes of
// every group that the LDS serves in one cycle, both for ds_read_b128 (lanes 0-3 with 20-23, ...) and for consecutive lanes
// (ds_write_b128), touch eight different 16-byte columns of the 128-byte bank line: no conflicts.
//
// One b128 read feeds two MFMAs. A lane's eight elements are k = 16*half_slab + 8*(lane/32) + 0..7 while one MFMA expects
// k = 4*(lane/32) + 0..3: it gets elements 4*q..4*q+3 of both operands, a permutation of k that is the same for A and B.
// gfx950 has an MFMA for all eight, the 32x32x16, in the time of one of the two.
//
// The operands are swapped in the MFMA, so a lane holds four consecutive columns of one row of C.
#pragma once
#include "element_types.h"
#include "tile_order.h"

#if defined(__HIP_DEVICE_COMPILE__)
#define HO_SCHEDULE_FENCE() __builtin_amdgcn_sched_barrier(0)
#define HO_SCHEDULE(kind, count) __builtin_amdgcn_sched_group_barrier(kind, count, 0)
#define HO_PRIORITY(level) __builtin_amdgcn_s_setprio(level)
#define HO_OPAQUE(value) asm volatile("" : "+v"(value))  // the compiler assumes that the value changes here
#else
#define HO_SCHEDULE_FENCE()
#define HO_SCHEDULE(kind, count)
#define HO_PRIORITY(level)
#define HO_OPAQUE(value)
#endif

// block_sync_lds without the compiler's second `s_waitcnt lgkmcnt(0)` after the barrier: no request of this wave is outstanding there,
// and LDS serves later requests in order, so only the compiler must be kept from moving them up.
__device__ __forceinline__ void stage_barrier() {
#if defined(__HIP_DEVICE_COMPILE__) && HO_FENCE_OF_LDS
    __builtin_amdgcn_fence(__ATOMIC_RELEASE, "workgroup", "local");
    __builtin_amdgcn_s_barrier();
    __builtin_amdgcn_fence(__ATOMIC_ACQUIRE, "wavefront", "local");
#else
    block_sync_lds();
#endif
}
constexpr int kScheduleMfma = 0x8, kScheduleGlobalRead = 0x20, kScheduleLdsRead = 0x100, kScheduleLdsWrite = 0x200;

constexpr int kSlab = 32;

template <int kSide>
struct Tile {
    static constexpr int kWaves = kSide == 256 ? 8 : 4, kThreads = kWaves * kWave, kColumnWaves = kWaves / 2;
    static constexpr int kRowFrags = kSide / 64, kColumnFrags = kSide / 32 / kColumnWaves;  // of a wave
    static constexpr int kMfmas = (kWideMfma ? 1 : 2) * kRowFrags * kColumnFrags;           // of a wave, for half a slab
    static constexpr int kLoads = kSide * (kSlab / 8) / kThreads;  // 16-byte chunks of an operand's slab, of a thread
    static constexpr int kLds = 4 * kSide * kSlab;                 // elements of two stages of two operands
    static constexpr int kSpread = (kMfmas + (kWideMfma ? 4 * kLoads - 1 : 0)) / (4 * kLoads);  // MFMAs behind each write to LDS
};

struct ProductOperands {
    const uint16_t *a, *b, *d;  // d may be null
    uint16_t *c, *transposed;   // transposed, [n, m], may be null
    int m, n, k;
    float alpha, beta, gamma;
    bool bf16_result;  // for all operand types
};

template <int kSide>
struct Fragments {
    bf16x8 a[Tile<kSide>::kRowFrags], b[Tile<kSide>::kColumnFrags];
};

template <int kSide>
using Accumulators = f32x16[Tile<kSide>::kRowFrags][Tile<kSide>::kColumnFrags];

// One thread's part of a slab between global memory and LDS: chunk thread%4 of rows thread/4 + kThreads/4*i of both operands.
template <int kSide>
struct Staged {
    bf16x8 a[Tile<kSide>::kLoads], b[Tile<kSide>::kLoads];
};

// Rows past the end read the last row; their products are not stored.
template <int kSide>
struct PanelOffsets {
    uint32_t at[Tile<kSide>::kLoads];
    __device__ __forceinline__ PanelOffsets(int rows_left, int k) {
#pragma unroll
        for (int i = 0; i < Tile<kSide>::kLoads; i++) {
            const int row = static_cast<int>(threadIdx.x) / 4 + Tile<kSide>::kThreads / 4 * i;
            at[i] = static_cast<uint32_t>(row < rows_left ? row : rows_left - 1) * static_cast<uint32_t>(k);
        }
    }
};

template <bool kVector>
__device__ __forceinline__ bf16x8 load_chunk(const uint16_t* row, int column, int k) {
    bf16x8 value;
    if (kVector) {  // k % 8 == 0: a chunk is inside or outside as a whole
        value = load16(row + (column < k ? column : 0));
#pragma unroll
        for (int e = 0; e < 8; e++) value[e] = column < k ? value[e] : 0;
    } else {
#pragma unroll
        for (int e = 0; e < 8; e++) value[e] = column + e < k ? row[column + e] : 0;
    }
    return value;
}

template <class Element, int kSide>
__device__ __forceinline__ void multiply(const Fragments<kSide>& f, Accumulators<kSide>& acc) {
#pragma unroll
    for (int q = 0; q < (kWideMfma ? 1 : 2); q++)
#pragma unroll
        for (int i = 0; i < Tile<kSide>::kRowFrags; i++)
#pragma unroll
            for (int j = 0; j < Tile<kSide>::kColumnFrags; j++) {
                if constexpr (kWideMfma)
                    acc[i][j] = Element::mfma(f.b[j], f.a[i], acc[i][j]);
                else
                    acc[i][j] = Element::mfma(ho::half_of(f.b[j], q), ho::half_of(f.a[i], q), acc[i][j]);
            }
}

// The k loop. `lds` holds two stages of A rows then B rows.
template <class Element, int kSide, bool kVector>
__device__ __forceinline__ void accumulate(const ProductOperands& p, const uint16_t* a, const uint16_t* b, int a_rows, int b_rows,
                                           uint16_t* lds, Accumulators<kSide>& acc) {
    using T = Tile<kSide>;
    constexpr int kOperand = kSide * kSlab, kStage = 2 * kOperand, kRowsAtOnce = T::kThreads / 4;
    const int thread = threadIdx.x, lane = lane_id(), wave = wave_id();
    const int k = p.k, slabs = (k + kSlab - 1) / kSlab;
    const PanelOffsets<kSide> a_offsets(a_rows, k), b_offsets(b_rows, k);
    const int chunk = thread % 4, swizzle = (lane / 2) % 4;
    uint16_t* const store_at = lds + thread / 4 * kSlab + (chunk ^ (thread / 8 % 4)) * 8;
    const uint16_t *read_a[2], *read_b[2];
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const int column = ((2 * half + lane / 32) ^ swizzle) * 8;
        read_a[half] = lds + (wave / T::kColumnWaves * 32 * T::kRowFrags + lane % 32) * kSlab + column;
        read_b[half] = lds + kOperand + (wave % T::kColumnWaves * 32 * T::kColumnFrags + lane % 32) * kSlab + column;
    }

    auto fetch = [&](Staged<kSide>& staged, int slab) {  // may be past the end of k
#pragma unroll
        for (int i = 0; i < T::kLoads; i++) staged.a[i] = load_chunk<kVector>(a + a_offsets.at[i], slab * kSlab + chunk * 8, k);
#pragma unroll
        for (int i = 0; i < T::kLoads; i++) staged.b[i] = load_chunk<kVector>(b + b_offsets.at[i], slab * kSlab + chunk * 8, k);
    };
    auto fetch_full = [&](Staged<kSide>& staged, const uint16_t* a_slab, const uint16_t* b_slab) {
#pragma unroll
        for (int i = 0; i < T::kLoads; i++) staged.a[i] = load16(a_slab + (a_offsets.at[i] + chunk * 8));
#pragma unroll
        for (int i = 0; i < T::kLoads; i++) staged.b[i] = load16(b_slab + (b_offsets.at[i] + chunk * 8));
    };
    auto put = [&](const Staged<kSide>& staged, int stage) {
#pragma unroll
        for (int i = 0; i < T::kLoads; i++) *reinterpret_cast<bf16x8*>(store_at + stage * kStage + kRowsAtOnce * kSlab * i) = staged.a[i];
#pragma unroll
        for (int i = 0; i < T::kLoads; i++)
            *reinterpret_cast<bf16x8*>(store_at + stage * kStage + kOperand + kRowsAtOnce * kSlab * i) = staged.b[i];
    };
    auto get = [&](Fragments<kSide>& f, int stage, int half) {
#pragma unroll
        for (int i = 0; i < T::kRowFrags; i++)
            f.a[i] = *reinterpret_cast<const bf16x8*>(read_a[half] + stage * kStage + 32 * kSlab * i);
#pragma unroll
        for (int i = 0; i < T::kColumnFrags; i++)
            f.b[i] = *reinterpret_cast<const bf16x8*>(read_b[half] + stage * kStage + 32 * kSlab * i);
    };

    Staged<kSide> odd, even;  // odd slabs for stage 1 and even slabs for stage 0, in flight
    Fragments<kSide> first, second;
    fetch(even, 0);
    if (slabs > 1) fetch(odd, 1);
    put(even, 0);
    if (slabs > 2) fetch(even, 2);
    block_sync_lds();
    get(first, 0, 0);

    int slab = 0;
    auto full_step = [&](int stage, Staged<kSide>& staged, const uint16_t* a_slab, const uint16_t* b_slab) {
        HO_SCHEDULE_FENCE();
        get(second, stage, 1);
        put(staged, 1 - stage);
        fetch_full(staged, a_slab, b_slab);
        multiply<Element, kSide>(first, acc);
        HO_SCHEDULE(kScheduleLdsRead, T::kRowFrags + T::kColumnFrags);
        HO_SCHEDULE(kScheduleMfma, T::kColumnFrags);
#pragma unroll
        for (int i = 0; i < 2 * T::kLoads; i++) {
            HO_SCHEDULE(kScheduleLdsWrite, 1);
            HO_SCHEDULE(kScheduleGlobalRead, 1);
            HO_SCHEDULE(kScheduleMfma, T::kSpread);
        }
        HO_SCHEDULE(kScheduleMfma, T::kMfmas);
        HO_SCHEDULE_FENCE();
        stage_barrier();
        HO_SCHEDULE_FENCE();
        if (kSide == 256) HO_PRIORITY(1);  // over the SIMD's other wave, which may still copy its part of the next slab
        get(first, 1 - stage, 0);
        multiply<Element, kSide>(second, acc);
#pragma unroll
        for (int i = 0; i < T::kRowFrags + T::kColumnFrags; i++) {
            HO_SCHEDULE(kScheduleLdsRead, 1);
            HO_SCHEDULE(kScheduleMfma, 1);
        }
        HO_SCHEDULE(kScheduleMfma, T::kMfmas);
        HO_SCHEDULE_FENCE();
        if (kSide == 256) HO_PRIORITY(0);
    };
    if (kVector) {
        const uint16_t *a_slab = a + 3 * kSlab, *b_slab = b + 3 * kSlab;
        for (const int full = k / kSlab; slab + 5 <= full; slab += 2) {  // both fetches, slab+3 and slab+4, are full
            full_step(0, odd, a_slab, b_slab);
            full_step(1, even, a_slab + kSlab, b_slab + kSlab);
            a_slab += 2 * kSlab;
            b_slab += 2 * kSlab;
        }
    }
    auto last_step = [&](int stage, Staged<kSide>& staged) {
        get(second, stage, 1);
        if (slab + 1 < slabs) put(staged, 1 - stage);
        if (slab + 3 < slabs) fetch(staged, slab + 3);
        multiply<Element, kSide>(first, acc);
        stage_barrier();
        if (slab + 1 < slabs) get(first, 1 - stage, 0);
        multiply<Element, kSide>(second, acc);
        slab++;
    };
#pragma unroll 1
    while (slab < slabs) {
        last_step(0, odd);
        if (slab < slabs) last_step(1, even);
    }
}
