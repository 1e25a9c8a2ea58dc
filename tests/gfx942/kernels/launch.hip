// SPDX-License-Identifier: Apache-2.0
// What a launch must set up: indices and sizes in three dimensions, constants of the object, structures by value, dynamic LDS,
// and control flow that differs from lane to lane and from wave to wave.
#include <hip/hip_runtime.h>
#define KERNEL extern "C" __global__ __launch_bounds__(256) void

KERNEL where(int* y) {
    const int thread = threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z);
    const int block = blockIdx.x + gridDim.x * (blockIdx.y + gridDim.y * blockIdx.z);
    int* own = y + 8 * (block * blockDim.x * blockDim.y * blockDim.z + thread);
    own[0] = threadIdx.x, own[1] = threadIdx.y, own[2] = threadIdx.z;
    own[3] = blockIdx.x, own[4] = blockIdx.y, own[5] = blockIdx.z;
    own[6] = blockDim.x * 10000 + blockDim.y * 100 + blockDim.z, own[7] = gridDim.x * 10000 + gridDim.y * 100 + gridDim.z;
}

__constant__ int table[5] = {3, 1, 4, 1, 5};
__device__ int counter = 40;
KERNEL constants(int* y) { y[threadIdx.x] = table[threadIdx.x % 5] + counter; }

struct Shape { long long rows; int columns; float scale; short tag; };
KERNEL structure(int* y, Shape shape, double d, short h, bool flag) {
    y[0] = int(shape.rows), y[1] = shape.columns, y[2] = int(shape.scale), y[3] = shape.tag, y[4] = int(d), y[5] = h, y[6] = flag;
}

KERNEL collatz(const unsigned* x, int* y) {  // a loop of a different length in every lane
    unsigned value = x[blockIdx.x * 256 + threadIdx.x];
    int steps = 0;
    while (value != 1) {
        value = value % 2 ? 3 * value + 1 : value / 2;
        ++steps;
    }
    y[blockIdx.x * 256 + threadIdx.x] = steps;
}

KERNEL rounds_per_wave(int* y) {  // each wave goes another way, then they meet
    __shared__ int total[4];
    const int wave = __builtin_amdgcn_readfirstlane(threadIdx.x / 64);
    int sum = 0;
    for (int k = 0; k < 3 * wave; ++k) sum += y[threadIdx.x] + k;
    if (threadIdx.x % 64 == 0) total[wave] = sum;
    __syncthreads();
    y[256 + threadIdx.x] = total[0] + total[1] + total[2] + total[3];
}
