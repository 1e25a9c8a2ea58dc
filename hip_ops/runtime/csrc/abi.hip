// SPDX-License-Identifier: Apache-2.0
// The functions of a library that are no launchers; hip_ops/runtime/launchers.py calls them.
#include "portable.h"

// Raise it, and ABI_VERSION in launchers.py, when the meaning of a launcher's argument changes.
HO_EXPORT int ho_abi_version() { return 1; }

// Returns the runtime's message for a launcher's code. The caller does not own it.
HO_EXPORT const char* ho_error_string(int code) {
#if HO_HIP
  return hipGetErrorString(hipError_t(code));
#elif HO_CUDA
  return cudaGetErrorString(cudaError_t(code));
#else
  return code == 0 ? "no error" : "unknown";
#endif
}
