// Shared by the row-kernel tests: random inputs, an own rounding to bfloat16, each instruction set in turn, and the
// rule by which a result is judged.
//
// Every reference is a plain loop over a number type N. With N = Exact<T> (double; long double for T = double) it
// rounds nothing: the oracle. With N = accumulator_t<T> it is the plain version of the kernel, rounding to T where T is
// stored.
#pragma once

#include <gtest/gtest.h>
#include <omp.h>

#include <cmath>
#include <cstdint>
#include <cstring>
#include <random>
#include <type_traits>
#include <vector>

#include "espalier/base/dtype.h"
#include "espalier/ops/cpu/row_kernels.h"
#include "tests/support/instruction_sets.h"

namespace espalier {

using testing::for_each_set;

template <class T>
using Exact = std::conditional_t<std::is_same_v<T, double>, long double, double>;

// To nearest, ties to even, at eight significant bits, by arithmetic on the value.
inline float eight_bits(float value) {
  int exponent = 0;
  const float mantissa = std::frexp(value, &exponent);
  return std::ldexp(std::nearbyint(std::ldexp(mantissa, 8)), exponent - 8);
}
// The value after a store to T and a load; the oracle never rounds.
template <class T, class N>
N stored(N value) {
  if constexpr (std::is_same_v<T, bfloat16> && std::is_same_v<N, float>)
    return eight_bits(value);
  else
    return value;
}

template <class N, class T>
N number(T value) {
  if constexpr (std::is_same_v<T, bfloat16>)
    return static_cast<N>(static_cast<float>(value));
  else
    return static_cast<N>(value);
}
template <class T>
T of(double value) {
  if constexpr (std::is_same_v<T, bfloat16>)
    return bfloat16(eight_bits(static_cast<float>(value)));
  else
    return static_cast<T>(value);
}

// Values behind the end of every buffer, which no kernel may touch.
inline constexpr std::size_t kGuard = 70;
inline constexpr double kGuardValue = 77;

template <class T>
using Buffer = std::vector<T>;

// `count` normal values, then the guard.
template <class T>
Buffer<T> random_buffer(std::mt19937_64& random, std::int64_t count, double scale = 1) {
  std::normal_distribution<double> normal(0, scale);
  Buffer<T> buffer(static_cast<std::size_t>(count) + kGuard, of<T>(kGuardValue));
  for (std::int64_t i = 0; i < count; ++i) buffer[static_cast<std::size_t>(i)] = of<T>(normal(random));
  return buffer;
}
template <class T>
Buffer<T> filled_buffer(std::int64_t count, double value) {
  Buffer<T> buffer(static_cast<std::size_t>(count) + kGuard, of<T>(kGuardValue));
  for (std::int64_t i = 0; i < count; ++i) buffer[static_cast<std::size_t>(i)] = of<T>(value);
  return buffer;
}
template <class N, class T>
std::vector<N> numbers(const Buffer<T>& buffer) {
  std::vector<N> result;
  for (const T& value : buffer) result.push_back(number<N>(value));
  return result;
}

template <class T>
bool same_bits(const Buffer<T>& a, const Buffer<T>& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(T)) == 0;
}

// One half unit in the last place of a T, relative.
template <class T>
double roundoff() {
  return std::is_same_v<T, double> ? 0x1p-53 : std::is_same_v<T, float> ? 0x1p-24 : 0x1p-9;
}

// The error against the oracle, as a root of squares over the buffer, is at most twice that of the plain version, plus
// `roundings` roundings of the result: where a buffer has few values the plain version may be exact by luck, while
// each operation between input and result may round once. Guard values are the same in all three.
template <class T, class P, class E>
::testing::AssertionResult as_good_as_plain(const Buffer<T>& actual, const std::vector<P>& plain,
                                            const std::vector<E>& exact, double roundings) {
  if (actual.size() != exact.size() || plain.size() != exact.size()) return ::testing::AssertionFailure() << "sizes";
  for (std::size_t i = exact.size() - kGuard; i < exact.size(); ++i)
    if (number<double>(actual[i]) != kGuardValue) return ::testing::AssertionFailure() << "written past the end";
  E error = 0, plain_error = 0, size = 0;
  std::size_t worst = 0;
  E worst_error = -1;
  for (std::size_t i = 0; i < exact.size() - kGuard; ++i) {
    const E value = number<E>(actual[i]), off = value - exact[i];
    if (!std::isfinite(value)) return ::testing::AssertionFailure() << "not finite at " << i;
    if (std::abs(off) > worst_error) worst = i, worst_error = std::abs(off);
    error += off * off;
    plain_error += (static_cast<E>(plain[i]) - exact[i]) * (static_cast<E>(plain[i]) - exact[i]);
    size += exact[i] * exact[i];
  }
  const E bound = 2 * std::sqrt(plain_error) + static_cast<E>(roundings * roundoff<T>()) * std::sqrt(size);
  if (std::sqrt(error) <= bound) return ::testing::AssertionSuccess();
  return ::testing::AssertionFailure() << "error " << std::sqrt(error) << " of " << std::sqrt(size)
                                       << ", plain version " << std::sqrt(plain_error) << "; worst at " << worst << ": "
                                       << number<double>(actual[worst]) << " against " << exact[worst];
}

struct Size {
  std::int64_t rows, width;
};
// Odd, whole and broken vectors; the last ones are shared among threads.
inline constexpr Size kSizes[] = {{0, 5},  {1, 1},   {1, 7},    {7, 1},    {7, 64},    {1, 65},
                                  {64, 7}, {65, 64}, {7, 1000}, {1, 1000}, {65, 1000}, {1000, 65}};

// d/dx of f at *x, five points: the error is h^4 |f^(5)|/30 (about 1e-16 here) plus the rounding of f over h.
template <class F>
double derivative(double* x, F f) {
  constexpr double h = 1e-3;
  const double at = *x;
  const auto value = [&](double offset) {
    *x = at + offset;
    return f();
  };
  const double result = (8 * (value(h) - value(-h)) - (value(2 * h) - value(-2 * h))) / (12 * h);
  *x = at;
  return result;
}

}  // namespace espalier
