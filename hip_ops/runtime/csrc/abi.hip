// SPDX-License-Identifier: Apache-2.0
// What hip_ops/runtime/library.py asks of a library before and beside the operators.
#include "portable.h"

// Raise it, and ABI_VERSION in library.py, when the meaning of an argument of any launcher changes.
HO_EXPORT int ho_abi_version() { return 1; }

// The words for a code that a launcher returned. The caller does not own them.
HO_EXPORT const char* ho_error_string(int code) {
#if HO_HIP
  return hipGetErrorString(hipError_t(code));
#elif HO_CUDA
  return cudaGetErrorString(cudaError_t(code));
#else
  return code == 0 ? "no error" : "unknown";
#endif
}
