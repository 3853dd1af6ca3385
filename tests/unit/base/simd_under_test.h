// Functions that simd_under_test.cpp offers for each instruction set.
#pragma once

#include <cstdint>

#include "espalier/base/dtype.h"

namespace espalier::simd_test {

enum class Function { exp, exp2, exp_nonpositive, exp_by_powers, log, sqrt, abs, add_square, fma_square, fma_of_lanes };

// c of the functions that give x^2 + c.
inline constexpr double kAdded = 0.1;

struct Set {
  int lanes_float = 0;
  void (*map_float)(Function, const float* x, float* y, std::int64_t n) = nullptr;
  void (*map_double)(Function, const double* x, double* y, std::int64_t n) = nullptr;
  float (*sum_float)(const float* x, std::int64_t n) = nullptr;
  double (*sum_double)(const double* x, std::int64_t n) = nullptr;
  float (*max_float)(const float* x) = nullptr;  // of one vector
  double (*max_double)(const double* x) = nullptr;
  void (*widen)(const bfloat16* x, float* y, std::int64_t n) = nullptr;
  void (*narrow)(const float* x, bfloat16* y, std::int64_t n) = nullptr;
};

}  // namespace espalier::simd_test
