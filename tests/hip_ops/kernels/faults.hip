// SPDX-License-Identifier: Apache-2.0
// Mistakes that the CPU build must find, one a number; 0 is a kernel without any. test_portable_faults.py lists them.
#include "portable.h"

constexpr int kThreads = 128;

HO_KERNEL(ho_test_fault, 128)(float* out, int fault) {
  HO_LDS(float, tile, kThreads);
  HO_LDS(bf16, halves, 2 * kThreads);
  const int t = int(threadIdx.x);
  const bool second_wave = t >= kWave;
  float v = float(t);
  tile[t] = v;
  if (fault == 1 && second_wave) block_sync();              // half of the block
  if (fault == 2 && t % 2) block_sync();                    // half of a wave
  if (fault == 3 && t % 2) v = wave_xor(v, 1);              // half of a wave, collective of the wave
  if (fault == 4) {
    if (second_wave) block_sync_lds();                      // all threads, at different barriers
    else block_sync_lds();
  }
  if (fault == 5 && t == 5) return;                         // a thread that has left
  block_sync();
  if (fault == 6) v = tile[t + 1];                          // reads beyond the array in LDS
  if (fault == 12) v = static_cast<float*>(tile)[kThreads / 2 + t];
  if (fault == 7) v = out[t + 1];                           // and beyond global memory
  if (fault == 8) {                                         // 4 bytes at an odd multiple of 2
    *reinterpret_cast<uint32_t*>(&halves[1 + 2 * (t % 8)]) = 7u;
    v = float(halves[t]);
  }
  if (fault == 9) v = float(t << (t + 1));                  // a shift beyond the type
  if (fault == 10) v = bf16_to_float(halves[t]);            // unwritten LDS: no crash, a NaN
  if (fault == 11) store16(out + 1, f32x4{{1, 2, 3, 4}});   // 16 bytes at 4
  out[t] = v;
}

HO_EXPORT int ho_test_fault_run(void* out, int64_t fault, int64_t threads, void* stream) {
  return ho_launch(ho_test_fault, dim3(1), dim3(unsigned(threads)), stream, static_cast<float*>(out), int(fault));
}
