// SPDX-License-Identifier: Apache-2.0
// The 16-byte vector of an element type, for load16 and store16.
#pragma once

namespace ho {
template <class T>
struct Vector16Of;
template <>
struct Vector16Of<float> {
  using type = f32x4;
};
template <>
struct Vector16Of<uint32_t> {
  using type = u32x4;
};
template <>
struct Vector16Of<bf16> {
  using type = bf16x8;
};
template <class T>
using Vector16 = typename Vector16Of<T>::type;
}  // namespace ho

#if HO_WIDE_MFMA
constexpr bool kWideMfma = true;
#else
constexpr bool kWideMfma = false;
#endif

namespace ho {
__device__ __forceinline__ bf16x4 half_of(bf16x8 v, int part) {  // elements 4 part to 4 part + 3
  bf16x4 four;
#pragma unroll
  for (int e = 0; e < 4; ++e) four[e] = v[4 * part + e];
  return four;
}
}  // namespace ho
