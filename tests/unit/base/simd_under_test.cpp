// The functions of base/simd.h over arrays, compiled once per instruction set for simd_test.cpp.
#include "tests/unit/base/simd_under_test.h"
#include "espalier/base/simd.h"

namespace espalier::ESPALIER_SIMD {
namespace {

template <class T, class F>
void apply(const T* x, T* y, std::int64_t n, F f) {
  for_lanes<T>(n, [&](std::int64_t i, int count) { store_some(y + i, f(load_some(x + i, count)), count); });
}
template <class T>
void map(simd_test::Function function, const T* x, T* y, std::int64_t n) {
  using simd_test::Function;
  switch (function) {
    case Function::exp:
      return apply(x, y, n, [](auto v) { return exp(v); });
    case Function::exp2:
      return apply(x, y, n, [](auto v) { return exp2(v); });
    case Function::exp_nonpositive:
      return apply(x, y, n, [](auto v) { return exp_nonpositive(v); });
    case Function::exp_by_powers:
      return apply(x, y, n, [](auto v) {
        const auto power = whole_exponent(v, static_cast<T>(1.4426950408889634));
        return times_power(exp_mantissa(v, T(1), power), power);
      });
    case Function::log:
      return apply(x, y, n, [](auto v) { return log(v); });
    case Function::sqrt:
      return apply(x, y, n, [](auto v) { return sqrt(v); });
    case Function::abs:
      return apply(x, y, n, [](auto v) { return abs(v); });
    case Function::add_square:
      return apply(x, y, n, [](auto v) { return v * v + static_cast<T>(simd_test::kAdded); });
    case Function::fma_square:
      return apply(x, y, n, [](auto v) { return fma(v, v, simd_test::kAdded); });
    case Function::fma_of_lanes:
      for (std::int64_t i = 0; i < n; ++i) y[i] = fma(x[i], x[i], static_cast<T>(simd_test::kAdded));
      return;
  }
}
template <class T>
T reduce_sum(const T* x, std::int64_t n) {
  Vector<T> total{};
  for_lanes<T>(n, [&](std::int64_t i, int count) { total += load_some(x + i, count); });
  return sum(total);
}
template <class T>
T reduce_max(const T* x) {
  return max_of(load(x));
}

}  // namespace

simd_test::Set set_under_test();
simd_test::Set set_under_test() {
  simd_test::Set set;
  set.lanes_float = kLanes<float>;
  set.map_float = map<float>;
  set.map_double = map<double>;
  set.sum_float = reduce_sum<float>;
  set.sum_double = reduce_sum<double>;
  set.max_float = reduce_max<float>;
  set.max_double = reduce_max<double>;
  set.widen = [](const bfloat16* x, float* y, std::int64_t n) {
    for_lanes<float>(n, [&](std::int64_t i, int count) { store_some(y + i, load_some(x + i, count), count); });
  };
  set.narrow = [](const float* x, bfloat16* y, std::int64_t n) {
    for_lanes<float>(n, [&](std::int64_t i, int count) { store_some(y + i, load_some(x + i, count), count); });
  };
  return set;
}

}  // namespace espalier::ESPALIER_SIMD
