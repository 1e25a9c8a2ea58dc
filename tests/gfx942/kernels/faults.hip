// SPDX-License-Identifier: Apache-2.0
// Small kernels, each right or with one bug, for the tests of the emulator. 256 threads: four waves.
#include <hip/hip_runtime.h>
#define KERNEL extern "C" __global__ __launch_bounds__(256) void

__device__ __forceinline__ void lds_only_barrier() {
    __builtin_amdgcn_fence(__ATOMIC_RELEASE, "workgroup", "local");
    __builtin_amdgcn_s_barrier();
    __builtin_amdgcn_fence(__ATOMIC_ACQUIRE, "workgroup", "local");
}

// y[i] = x of the opposite thread of the block, exchanged through LDS
template <bool kBarrier> __device__ __forceinline__ void reverse_block(const float* x, float* y) {
    __shared__ float exchange[256];
    const int i = blockIdx.x * 256 + threadIdx.x;
    exchange[threadIdx.x] = x[i];
    if (kBarrier) __syncthreads();
    else asm volatile("s_waitcnt lgkmcnt(0)" ::: "memory");
    y[i] = exchange[255 - threadIdx.x];
}
KERNEL reverse_right(const float* x, float* y) { reverse_block<true>(x, y); }
KERNEL reverse_lost_barrier(const float* x, float* y) { reverse_block<false>(x, y); }

// running sum over `steps` rounds; the buffer is reused, so a second barrier must follow the read
template <bool kSecondBarrier> __device__ __forceinline__ void reuse(const float* x, float* y, int steps) {
    __shared__ float exchange[256];
    float sum = 0.f;
    for (int step = 0; step < steps; ++step) {
        exchange[threadIdx.x] = x[step * 256 + threadIdx.x];
        lds_only_barrier();
        sum += exchange[(threadIdx.x + 64) & 255];
        if (kSecondBarrier) lds_only_barrier();
    }
    y[threadIdx.x] = sum;
}
KERNEL reuse_right(const float* x, float* y, int steps) { reuse<true>(x, y, steps); }
KERNEL reuse_lost_barrier(const float* x, float* y, int steps) { reuse<false>(x, y, steps); }

KERNEL two_waves_write_one_place(float* y) {
    __shared__ float shared[64];
    shared[threadIdx.x & 63] = float(threadIdx.x);
    __syncthreads();
    y[threadIdx.x] = shared[threadIdx.x & 63];
}

KERNEL two_waves_write_one_value(float* y) {
    __shared__ float shared[64];
    shared[threadIdx.x & 63] = float(threadIdx.x & 63);
    __syncthreads();
    y[threadIdx.x] = shared[threadIdx.x & 63];
}

KERNEL reads_unwritten_lds(float* y) {
    __shared__ float shared[256];
    if (threadIdx.x != 77) shared[threadIdx.x] = 1.f;
    __syncthreads();
    y[threadIdx.x] = shared[threadIdx.x ^ 64];
}

KERNEL lds_out_of_range(float* y, int shift) {
    __shared__ float shared[256];
    shared[threadIdx.x + shift] = 1.f;
    __syncthreads();
    y[threadIdx.x] = shared[threadIdx.x];
}

KERNEL copy_shifted(const float* x, float* y, int from, int to) {
    const int i = blockIdx.x * 256 + threadIdx.x;
    y[i + to] = x[i + from];
}

KERNEL misaligned(const char* x, float* y, int shift) { y[threadIdx.x] = *(const float*)(x + 4 * threadIdx.x + shift); }

KERNEL barrier_of_some_waves(float* y) {
    y[threadIdx.x] = 0.f;
    if (threadIdx.x < 128) __builtin_amdgcn_s_barrier();
    y[threadIdx.x] = 1.f;
}

KERNEL two_barriers(float* y, int n) {
    if (__builtin_amdgcn_readfirstlane(threadIdx.x) < n) {
        y[threadIdx.x] = 1.f;
        __builtin_amdgcn_s_barrier();
        asm volatile("s_nop 1");
    } else {
        y[threadIdx.x] = 2.f;
        __builtin_amdgcn_s_barrier();
        asm volatile("s_nop 2");
    }
}

KERNEL blocks_write_one_place(float* y, int same) { y[threadIdx.x] = same ? 1.f : float(blockIdx.x); }
KERNEL block_reads_another(float* y) {
    float* own = y + 256 * blockIdx.x;
    own[threadIdx.x] = 1.f;
    if (blockIdx.x > 0) own[threadIdx.x] = (own - 256)[threadIdx.x];
}

// loads that the compiler does not know of
template <int kWait> __device__ __forceinline__ void load_by_hand(const float* x, float* y) {
    float first, second;
    asm volatile("global_load_dword %0, %2, off\n\tglobal_load_dword %1, %2, off offset:1024" : "=&v"(first), "=&v"(second) : "v"(x + threadIdx.x));
    if (kWait == 1) asm volatile("s_waitcnt vmcnt(1)" : "+v"(first));
    if (kWait == 0) asm volatile("s_waitcnt vmcnt(0)" : "+v"(first), "+v"(second));
    asm volatile("v_add_f32 %0, 1.0, %0" : "+v"(first));
    y[threadIdx.x] = first;
    if (kWait != 1) {
        asm volatile("v_add_f32 %0, 1.0, %0" : "+v"(second));
        y[256 + threadIdx.x] = second;
    }
}
KERNEL waits_for_all(const float* x, float* y) { load_by_hand<0>(x, y); }
KERNEL waits_for_one(const float* x, float* y) { load_by_hand<1>(x, y); }
KERNEL waits_for_none(const float* x, float* y) { load_by_hand<2>(x, y); }

KERNEL barrier_before_lds_write_is_done(float* y) {
    __shared__ float shared[256];
    asm volatile("ds_write_b32 %0, %1" ::"v"(unsigned((__attribute__((address_space(3))) float*)(shared + threadIdx.x))), "v"(1.f) : "memory");
    asm volatile("s_barrier" ::: "memory");
    y[threadIdx.x] = shared[threadIdx.x ^ 64];
}

KERNEL reads_unset_register(float* y) {
    float value;
    asm volatile("v_add_f32 %0, 1.0, v200" : "=v"(value)::"v201");
    y[threadIdx.x] = value;
}

KERNEL spills(const float* x, float* y, int n) {
    float kept[64];
    for (int k = 0; k < 64; ++k) kept[k] = x[k * 256 + threadIdx.x];
    for (int k = 0; k < n; ++k) kept[(k * 7 + threadIdx.x) & 63] += 1.f;
    y[threadIdx.x] = kept[n & 63];
}

KERNEL unknown_instruction(float* y) {
    asm volatile("v_mqsad_u32_u8 v[4:7], v[0:1], v2, v[8:11]" ::: "v4", "v5", "v6", "v7", "v8", "v9", "v10", "v11");
    y[threadIdx.x] = 0.f;
}

KERNEL endless(float* y) {
    for (unsigned k = 0; k < 0xfffffff0u; ++k) asm volatile("s_nop 0");
    y[threadIdx.x] = 0.f;
}
