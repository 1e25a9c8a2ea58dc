// SPDX-License-Identifier: Apache-2.0
// The two 16-bit element types of the matrix products. Both are raw bits in registers and LDS (uint16_t vectors of
// portable.h); only conversion and MFMA differ.
//
// Half precision: unlike bfloat16 it has an 11-bit significand but a narrow exponent, so the Newton-Schulz driver keeps its
// matrices scaled by powers of two (hip_ops/ops/newton_schulz/plan.py). gfx942 runs both types at the same MFMA rate.
#pragma once
#include "portable.h"
#if HO_CUDA
#include <cuda_fp16.h>
#endif

__device__ __forceinline__ float half_to_float(uint16_t bits) {
#if HO_CUDA
    return __half2float(__ushort_as_half(bits));
#else
    _Float16 value;
    __builtin_memcpy(&value, &bits, 2);
    return static_cast<float>(value);
#endif
}

__device__ __forceinline__ uint16_t float_to_half(float value) {
#if HO_CUDA
    return __half_as_ushort(__float2half_rn(value));
#else
    _Float16 rounded = static_cast<_Float16>(value);  // round to nearest even on every target; overflow gives infinity
    uint16_t bits;
    __builtin_memcpy(&bits, &rounded, 2);
    return bits;
#endif
}

struct Bfloat16 {
    static __device__ __forceinline__ float to_float(uint16_t bits) { return bf16_to_float(bits); }
    static __device__ __forceinline__ uint16_t from_float(float value) { return float_to_bf16(value); }
    static __device__ __forceinline__ f32x16 mfma(bf16x4 a, bf16x4 b, f32x16 c) { return mfma_32x32x8(a, b, c); }
    static __device__ __forceinline__ f32x16 mfma(bf16x8 a, bf16x8 b, f32x16 c) { return mfma_32x32x16(a, b, c); }
};

struct Float16 {
    static __device__ __forceinline__ float to_float(uint16_t bits) { return half_to_float(bits); }
    static __device__ __forceinline__ uint16_t from_float(float value) { return float_to_half(value); }
#if HO_HIP
    static __device__ __forceinline__ f32x16 mfma(bf16x4 a, bf16x4 b, f32x16 c) {
        typedef _Float16 half4 __attribute__((ext_vector_type(4)));
        half4 left, right;
        __builtin_memcpy(&left, &a, 8);
        __builtin_memcpy(&right, &b, 8);
        return __builtin_amdgcn_mfma_f32_32x32x8f16(left, right, c, 0, 0, 0);
    }
    static __device__ __forceinline__ f32x16 mfma(bf16x8 a, bf16x8 b, f32x16 c) {
#if HO_WIDE_MFMA
        typedef _Float16 half8 __attribute__((ext_vector_type(8)));
        half8 left, right;
        __builtin_memcpy(&left, &a, 16);
        __builtin_memcpy(&right, &b, 16);
        return __builtin_amdgcn_mfma_f32_32x32x16_f16(left, right, c, 0, 0, 0);
#else
        return mfma(ho::half_of(a, 1), ho::half_of(b, 1), mfma(ho::half_of(a, 0), ho::half_of(b, 0), c));
#endif
    }
#else
    // The verification targets have only the bf16 product. A half is the exact sum of two bfloat16, so four products give the same terms.
    template <class Operand>
    static __device__ __forceinline__ f32x16 mfma(Operand a, Operand b, f32x16 c) {
        Operand a_high, a_low, b_high, b_low;
        for (int e = 0; e < int(sizeof(Operand) / 2); e++) {
            const float left = half_to_float(a[e]), right = half_to_float(b[e]);
            a_high[e] = float_to_bf16(left);
            a_low[e] = float_to_bf16(left - bf16_to_float(a_high[e]));
            b_high[e] = float_to_bf16(right);
            b_low[e] = float_to_bf16(right - bf16_to_float(b_high[e]));
        }
        c = Bfloat16::mfma(a_low, b_low, c);
        c = Bfloat16::mfma(a_low, b_high, c);
        c = Bfloat16::mfma(a_high, b_low, c);
        return Bfloat16::mfma(a_high, b_high, c);
    }
#endif
};
