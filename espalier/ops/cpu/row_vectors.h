// Vector helpers of the row kernels beyond base/simd.h: rounding to the stored type, and sums over a row.
#pragma once

#include "espalier/base/simd.h"

namespace espalier::ESPALIER_SIMD {

// The value after a store to T and a load: to nearest, ties to even. Stays within the float's 32 bits, at half the cost
// of a conversion to 16 bits and back.
template <class T>
ESPALIER_SIMD_INLINE Vector<T> rounded(Vector<T> v) {
  if constexpr (sizeof(T) == 2) {
    using Bits = VectorType<float>::bits;
    const Bits raw = reinterpret<Bits>(v);
    return v == v ? reinterpret<Vector<T>>((raw + 0x7fffu + ((raw >> 16) & 1u)) & 0xffff0000u) : v;
  } else {
    return v;
  }
}

// Partial sums of a row in a fixed number of lanes for all instruction sets: 16 of float, 8 of double, in one or more
// vectors. The halves of the lanes are added until one is left. Every instruction set with fused products gives the
// same bits.
template <class T>
struct RowSum {
  static constexpr int kParts = 64 / ESPALIER_SIMD_BYTES, kStep = kParts * kLanes<T>;
  Vector<T> part[kParts] = {};

  ESPALIER_SIMD_INLINE RowSum operator+(const RowSum& other) const {
    RowSum out;
    for (int p = 0; p < kParts; ++p) out.part[p] = part[p] + other.part[p];
    return out;
  }
  ESPALIER_SIMD_INLINE accumulator_t<T> total() const {
    if constexpr (kParts == 4)
      return sum((part[0] + part[2]) + (part[1] + part[3]));
    else if constexpr (kParts == 2)
      return sum(part[0] + part[1]);
    else
      return sum(part[0]);
  }
};

// Calls body(part, index, count) for one step of a RowSum from `begin` on, with at most `count` values.
template <class T, class Body>
ESPALIER_SIMD_INLINE void for_parts(std::int64_t begin, std::int64_t count, Body body) {
#pragma GCC unroll 4
  for (int p = 0; p < RowSum<T>::kParts; ++p) {
    const std::int64_t rest = count - p * kLanes<T>;
    if (rest > 0) body(p, begin + p * kLanes<T>, rest < kLanes<T> ? static_cast<int>(rest) : kLanes<T>);
  }
}
// The same for [begin, end).
template <class T, class Body>
ESPALIER_SIMD_INLINE void for_row_parts(std::int64_t begin, std::int64_t end, Body body) {
  for (; begin + RowSum<T>::kStep <= end; begin += RowSum<T>::kStep) for_parts<T>(begin, RowSum<T>::kStep, body);
  if (begin < end) for_parts<T>(begin, end - begin, body);
}

// A sum over [0, width) in steps of kLanes<T>: add(sum, i, count) gives the sum with the terms from i on, in whose
// lanes at and above count nothing is added. Four sets of lanes: short dependency chains, and an error that grows with
// width/64 instead of width.
template <class T, class Add>
ESPALIER_SIMD_INLINE accumulator_t<T> sum_over(std::int64_t width, Add add) {
  constexpr int kStep = RowSum<T>::kStep;
  RowSum<T> sums[4];
  const auto add_step = [&](RowSum<T>& to, std::int64_t begin, std::int64_t count) {
    for_parts<T>(begin, count,
                 [&](int part, std::int64_t i, int lanes) { to.part[part] = add(to.part[part], i, lanes); });
  };
  std::int64_t i = 0;
  for (; i + 4 * kStep <= width; i += 4 * kStep) {
    add_step(sums[0], i, kStep);
    add_step(sums[1], i + kStep, kStep);
    add_step(sums[2], i + 2 * kStep, kStep);
    add_step(sums[3], i + 3 * kStep, kStep);
  }
  for (; i + kStep <= width; i += kStep) add_step(sums[0], i, kStep);
  if (i < width) add_step(sums[1], i, width - i);
  return ((sums[0] + sums[1]) + (sums[2] + sums[3])).total();
}

// The sum of x_i^2, and of x_i y_i.
template <class T>
ESPALIER_SIMD_INLINE accumulator_t<T> sum_of_squares(std::int64_t width, const T* x) {
  return sum_over<T>(width, [&](Vector<T> sum, std::int64_t i, int count) {
    const Vector<T> v = load_some(x + i, count);
    return fma(v, v, sum);
  });
}
template <class T>
ESPALIER_SIMD_INLINE accumulator_t<T> dot(std::int64_t width, const T* x, const T* y) {
  return sum_over<T>(width, [&](Vector<T> sum, std::int64_t i, int count) {
    return fma(load_some(x + i, count), load_some(y + i, count), sum);
  });
}

inline float inverse_root(float x) { return 1.0f / __builtin_sqrtf(x); }
inline double inverse_root(double x) { return 1.0 / __builtin_sqrt(x); }

}  // namespace espalier::ESPALIER_SIMD
