// SPDX-License-Identifier: Apache-2.0
// Kernels whose traffic, bank conflicts, MFMA and barrier counts can be worked out by hand. 256 threads: four waves.
#include <hip/hip_runtime.h>
#define KERNEL extern "C" __global__ __launch_bounds__(256) void
typedef float f32x4 __attribute__((ext_vector_type(4)));
typedef float f32x16 __attribute__((ext_vector_type(16)));
typedef short bf16x4 __attribute__((ext_vector_type(4)));

KERNEL copy16(const f32x4* x, f32x4* y) { y[blockIdx.x * 256 + threadIdx.x] = x[blockIdx.x * 256 + threadIdx.x]; }
KERNEL copy2(const short* x, short* y, int n) {
    const int i = blockIdx.x * 256 + threadIdx.x;
    if (i < n) y[i] = x[i];
}
KERNEL gather4(const float* x, float* y, int stride) { y[threadIdx.x] = x[threadIdx.x * stride]; }
KERNEL rows(const float* x, float* y, int n) {  // block b reads row b % n
    y[blockIdx.x * 256 + threadIdx.x] = x[(blockIdx.x % n) * 256 + threadIdx.x];
}

template <class T> __device__ __forceinline__ void through_lds(T* y, int stride) {
    extern __shared__ __attribute__((aligned(16))) char raw[];
    T* shared = (T*)raw;
    const int wave_words = 64 * stride, at = (threadIdx.x / 64) * wave_words + (threadIdx.x % 64) * stride;
    T value = {};
    shared[at] = value;
    __syncthreads();
    y[threadIdx.x] = shared[at];
}
KERNEL lds4(float* y, int stride) { through_lds(y, stride); }
KERNEL lds16(f32x4* y, int stride) { through_lds(y, stride); }

KERNEL products(const bf16x4* x, f32x4* y, int n) {
    bf16x4 a = x[threadIdx.x];
    f32x16 wide = {};
    f32x4 small = {};
    for (int k = 0; k < n; ++k) {
        wide = __builtin_amdgcn_mfma_f32_32x32x8bf16_1k(a, a, wide, 0, 0, 0);
        small = __builtin_amdgcn_mfma_f32_16x16x16bf16_1k(a, a, small, 0, 0, 0);
        __syncthreads();
    }
    y[threadIdx.x] = small + f32x4{wide[0], wide[5], wide[10], wide[15]};
}

// Block b reads the panels of 256 floats that tiles[b] names: what a tile of A A^T does with its two row panels.
KERNEL tiles(const float* x, float* y, const int2* tile) {
    const int2 at = tile[blockIdx.x];
    y[blockIdx.x * 256 + threadIdx.x] = x[at.x * 256 + threadIdx.x] * x[at.y * 256 + threadIdx.x];
}
