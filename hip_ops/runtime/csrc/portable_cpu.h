// SPDX-License-Identifier: Apache-2.0
// portable.h for the CPU (g++, C++17): the kernels as ordinary code, for tests and under sanitizers. The execution model is in
// portable_cpu_machine.h. LDS holds NaNs at the start of every block.
#pragma once

#include <cmath>

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline __attribute__((always_inline))
#define __launch_bounds__(...)

#include "portable_cpu_machine.h"

constexpr int kWave = ho_cpu::kLanes;

namespace ho {
template <class T, int N>
struct alignas(sizeof(T) * N) Vector {
  T v[N];
  T& operator[](int i) { return v[i]; }
  const T& operator[](int i) const { return v[i]; }
};
template <class T>
struct Identity {
  using type = T;
};
}  // namespace ho

using f32x4 = ho::Vector<float, 4>;
using f32x16 = ho::Vector<float, 16>;
using u32x4 = ho::Vector<uint32_t, 4>;
using bf16x4 = ho::Vector<bf16, 4>;
using bf16x8 = ho::Vector<bf16, 8>;

#include "portable_bf16.h"
#include "portable_vector16.h"

#define threadIdx (ho_cpu::current().thread)
#define blockIdx (ho_cpu::machine.index)
#define blockDim (ho_cpu::machine.block)
#define gridDim (ho_cpu::machine.grid)

// Blocks run one at a time, so that a static array is one block's.
#define HO_LDS(type, name, count)        \
  alignas(16) static type name[count];   \
  static uint64_t name##_of_block = 0;   \
  ho_cpu::poison_once(name, sizeof(name), name##_of_block)
#define HO_LDS_BIG(type, name, count) HO_LDS(type, name, count)
#define HO_KERNEL(name, threads) extern "C" void name
#define HO_EXPORT extern "C" __attribute__((visibility("default")))

template <class... P>
inline int ho_launch(void (*kernel)(P...), dim3 grid, dim3 block, void* /*stream*/, typename ho::Identity<P>::type... arguments) {
  auto call = [&] { kernel(arguments...); };
  ho_cpu::machine.launch(grid, block, [](void* body) { (*static_cast<decltype(call)*>(body))(); }, &call);
  return 0;
}

template <class... P>
inline int ho_launch_lds(void (*kernel)(P...), dim3 grid, dim3 block, size_t, void* stream, typename ho::Identity<P>::type... arguments) {
  return ho_launch(kernel, grid, block, stream, arguments...);
}

inline int lane_id() { return ho_cpu::lane(); }
inline int wave_id() { return int(threadIdx.x) / kWave; }

// The default arguments are evaluated at the call in the kernel and give its line.
#define HO_CPU_SITE const char *file = __builtin_FILE(), int line = __builtin_LINE()

inline void block_sync(HO_CPU_SITE) { ho_cpu::machine.suspend(ho_cpu::State::kInBlock, {"block_sync", file, line}); }
inline void block_sync_lds(HO_CPU_SITE) { ho_cpu::machine.suspend(ho_cpu::State::kInBlock, {"block_sync_lds", file, line}); }
inline void wave_sync(HO_CPU_SITE) { ho_cpu::machine.suspend(ho_cpu::State::kInWave, {"wave_sync", file, line}); }

inline float wave_xor(float v, int mask, HO_CPU_SITE) {
  ho_cpu::Exchange lanes, unused;
  ho_cpu::put(0, v);
  ho_cpu::meet(lanes, unused, {"wave_xor", file, line});
  return lanes.of<float>(lane_id() ^ mask);
}

namespace ho {
template <int M, class Operand, class Accumulator>
inline Accumulator mfma(Operand a, Operand b, Accumulator c, ho_cpu::Site site) {
  ho_cpu::Exchange all_a, all_b;
  ho_cpu::put(0, a);
  ho_cpu::put(1, b);
  ho_cpu::meet(all_a, all_b, site);
  const int lane = lane_id();
  for (int r = 0; r < M * M / kWave; ++r) {
    const int row = M == 32 ? 8 * (r / 4) + 4 * (lane / 32) + r % 4 : 4 * (lane / 16) + r;
    for (int slot = 0; slot < kWave / M; ++slot) {
      const Operand x = all_a.of<Operand>(slot * M + row), y = all_b.of<Operand>(slot * M + lane % M);
      for (int e = 0; e < int(sizeof(Operand) / 2); ++e) c[r] += bf16_to_float(x[e]) * bf16_to_float(y[e]);
    }
  }
  return c;
}
}  // namespace ho

inline f32x16 mfma_32x32x8(bf16x4 a, bf16x4 b, f32x16 c, HO_CPU_SITE) { return ho::mfma<32>(a, b, c, {"mfma_32x32x8", file, line}); }
inline f32x4 mfma_16x16x16(bf16x4 a, bf16x4 b, f32x4 c, HO_CPU_SITE) { return ho::mfma<16>(a, b, c, {"mfma_16x16x16", file, line}); }

#if HO_WIDE_MFMA
inline f32x16 mfma_32x32x16(bf16x8 a, bf16x8 b, f32x16 c, HO_CPU_SITE) { return ho::mfma<32>(a, b, c, {"mfma_32x32x16", file, line}); }
inline f32x4 mfma_16x16x32(bf16x8 a, bf16x8 b, f32x4 c, HO_CPU_SITE) { return ho::mfma<16>(a, b, c, {"mfma_16x16x32", file, line}); }
#else
inline f32x16 mfma_32x32x16(bf16x8 a, bf16x8 b, f32x16 c, HO_CPU_SITE) {
  for (int part = 0; part < 2; ++part) c = mfma_32x32x8(ho::half_of(a, part), ho::half_of(b, part), c, file, line);
  return c;
}
inline f32x4 mfma_16x16x32(bf16x8 a, bf16x8 b, f32x4 c, HO_CPU_SITE) {
  for (int part = 0; part < 2; ++part) c = mfma_16x16x16(ho::half_of(a, part), ho::half_of(b, part), c, file, line);
  return c;
}
#endif

template <class T>
inline T load_global(const T* p) {
  return *p;
}

template <class T>
inline void store_global(T* p, typename ho::Identity<T>::type v) {
  *p = v;
}

template <class T>
inline ho::Vector16<T> load16(const T* p) {
  return *reinterpret_cast<const ho::Vector16<T>*>(p);
}

template <class T>
inline void store16(T* p, ho::Vector16<T> v) {
  *reinterpret_cast<ho::Vector16<T>*>(p) = v;
}

template <class T>
inline ho::Vector16<T> load_nontemporal16(const T* p) {
  return load16(p);
}

template <class T>
inline void store_nontemporal16(T* p, ho::Vector16<T> v) {
  store16(p, v);
}

inline float rsqrtf(float x) { return 1.0f / std::sqrt(x); }
