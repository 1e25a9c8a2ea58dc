// SPDX-License-Identifier: Apache-2.0
// Included before a kernel source for the CPU: launches are recorded and not run. A record is a line: the kernel's name, a letter for each of
// its pointers (0: null, p: any other), the grid's x and y, and the kernel's integer arguments.
#pragma once

#include <dlfcn.h>

#include <sstream>
#include <string>
#include <type_traits>

#include "portable.h"

namespace recorded {

inline std::ostringstream launches;

template <class T>
void add_pointer(T value) {
  if constexpr (std::is_pointer_v<T>) launches << (value ? 'p' : '0');
}

template <class T>
void add_integer(T value) {
  if constexpr (std::is_integral_v<T>) launches << ' ' << int64_t(value);
}

template <class... P>
int launch(void (*kernel)(P...), dim3 grid, typename ho::Identity<P>::type... arguments) {
  Dl_info found{};
  dladdr(reinterpret_cast<void*>(kernel), &found);
  launches << (found.dli_sname ? found.dli_sname : "?") << ' ';
  (add_pointer(arguments), ...);
  launches << ' ' << grid.x << ' ' << grid.y;
  (add_integer(arguments), ...);
  launches << '\n';
  return 0;
}

}  // namespace recorded

#define ho_launch(kernel, grid, block, stream, ...) recorded::launch(kernel, grid, __VA_ARGS__)
#define ho_launch_lds(kernel, grid, block, bytes, stream, ...) recorded::launch(kernel, grid, __VA_ARGS__)

// Returns the records since the last call.
extern "C" __attribute__((weak, visibility("default"))) const char* take_records() {
  static std::string text;
  text = recorded::launches.str();
  recorded::launches.str("");
  return text.c_str();
}

#pragma GCC visibility push(default)  // dladdr finds the kernels' names
