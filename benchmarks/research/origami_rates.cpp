// SPDX-License-Identifier: Apache-2.0
// Rates of bf16 products on an MI300X by AMD's analytic model (rocm-origami 0.0.3 of PyPI), beside zaya_plugin/plan/products.py.
// The sources are plain arithmetic but for two calls of HIP, which asks for a device; they are replaced below. With the unpacked
// source package in ORIGAMI, and HIP's headers:
//   g++ -std=c++17 -D__HIP_PLATFORM_AMD__ -I$ORIGAMI/include benchmarks/research/origami_rates.cpp $ORIGAMI/src/origami/*.cpp \
//       $ORIGAMI/src/simulator/tensilelite/*.cpp -o origami_rates && ./origami_rates
#include <cstdio>
#include <vector>

#include "origami/origami.hpp"

extern "C" hipError_t hipGetDevicePropertiesR0600(hipDeviceProp_t*, int) { return hipErrorNoDevice; }
#undef hipGetDeviceProperties
extern "C" hipError_t hipGetDeviceProperties(hipDeviceProp_t*, int) { return hipErrorNoDevice; }
extern "C" const char* hipGetErrorString(hipError_t) { return "no device"; }

int main() {
  using namespace origami;
  const double clock = 2.1e9;
  const auto hardware = hardware_t::get_hardware_for_arch(hardware_t::architecture_t::gfx942, 304, 65536, 4u << 20, int(clock / 1e3));
  const size_t tiles[][3] = {{64, 64, 64},   {128, 128, 32}, {128, 128, 64}, {256, 128, 64}, {128, 256, 64}, {256, 160, 64},
                             {256, 192, 64}, {192, 256, 64}, {256, 224, 64}, {224, 256, 64}, {256, 256, 32}, {256, 256, 64}};
  std::vector<config_t> configs;
  for (const auto& tile : tiles) {
    for (const dim3_t mi : {dim3_t{16, 16, 16}, dim3_t{32, 32, 8}}) {
      config_t config;
      config.mt = {tile[0], tile[1], tile[2]}, config.mi = mi, config.occupancy = 1;
      configs.push_back(config);
    }
  }
  const size_t sizes[][4] = {{2048, 2048, 2048, 1},       {4096, 4096, 4096, 1},  {8192, 8192, 8192, 1},  {16384, 16384, 16384, 1},
                             {1024, 4096, 2048, 16},      {2048, 4096, 2048, 16}, {16384, 1536, 2048, 1}, {16384, 262272, 2048, 1}};
  for (const auto& size : sizes) {
    problem_t problem;
    problem.size = {size[0], size[1], size[2]}, problem.batch = size[3];
    problem.a_transpose = transpose_t::T, problem.b_transpose = transpose_t::N;
    problem.a_dtype = problem.b_dtype = problem.c_dtype = problem.d_dtype = problem.mi_dtype = data_type_t::BFloat16;
    const auto best = select_config(problem, hardware, configs);
    const double operations = 2.0 * size[0] * size[1] * size[2] * size[3];
    std::printf("%zu x %zu x %zu, %zu at once: tile %zu x %zu x %zu, %.1f TFLOP/s\n", size[0], size[1], size[2], size[3], best.config.mt.m,
                best.config.mt.n, best.config.mt.k, operations / (best.latency / clock) / 1e12);
  }
}
