// The keys that a query row sees, and the score of a pair, for the attention kernels: windows and soft caps of scores
// (ops/attention/rows.h).
#pragma once

#include "espalier/ops/attention/rows.h"
#include "espalier/ops/cuda/ptx.h"

namespace espalier::cuda {

using attention::Rows;
using attention::Shape;

constexpr float kLog2E = 1.44269504f, kLn2 = 0.69314718f;

__device__ __forceinline__ std::int64_t own_row_of(const Shape& shape, std::int64_t query) {
  return shape.query_row != nullptr ? shape.query_row[query] : query;
}

// The smallest depth that own row `row` sees; path row j has depth j.
__device__ __forceinline__ std::int32_t first_depth_of(const Shape& shape, std::int64_t row) {
  return shape.window > 0 ? shape.depth[row] + 1 - static_cast<std::int32_t>(shape.window) : 0;
}
// The depth of own row `row`; without a window 0, which every row sees.
__device__ __forceinline__ std::int32_t depth_of(const Shape& shape, std::int64_t row) {
  return shape.window > 0 ? shape.depth[row] : 0;
}

// A score and its slope by the scaled product. tanh x = 1 - 2 / (1 + e^2x) is off by a few units in the last place of
// 1, as much as the cap's own rounding.
template <class A>
struct Score {
  A value, slope;
};
__device__ __forceinline__ Score<float> capped(float x, float cap) {
  const float t = 1.f - 2.f / (1.f + exp2_approximate(x * (2.f * kLog2E / cap)));
  return {cap * t, 1.f - t * t};
}
template <class A>
__device__ __forceinline__ Score<A> score_of(const Shape& shape, A product) {
  const A x = static_cast<A>(shape.scale) * product, cap = static_cast<A>(shape.soft_cap);
  if (shape.soft_cap == 0) return {x, A(1)};
  const A t = std::tanh(x / cap);
  return {cap * t, A(1) - t * t};
}

}  // namespace espalier::cuda
