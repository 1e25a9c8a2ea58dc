// SPDX-License-Identifier: Apache-2.0
// bfloat16 in software: gfx942 has no conversion instruction (v_cvt_pk_bf16_f32 came with gfx950).
#pragma once

namespace ho {
union FloatBits {
  uint32_t bits;
  float value;
};
}  // namespace ho

__device__ __forceinline__ float bf16_to_float(bf16 v) {
  ho::FloatBits x;
  x.bits = uint32_t(v) << 16;
  return x.value;
}

// Round to nearest, ties to even; every NaN becomes the quiet NaN 0x7fc0, as in torch. Overflow gives infinity.
__device__ __forceinline__ bf16 float_to_bf16(float v) {
  ho::FloatBits x;
  x.value = v;
  const uint32_t rounded = x.bits + 0x7fffu + ((x.bits >> 16) & 1u);
  return v != v ? bf16(0x7fc0) : bf16(rounded >> 16);
}
