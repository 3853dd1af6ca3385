// Vector helpers of the row kernels beyond base/simd.h: rounding to the stored type, and sums over a row.
#pragma once

#include "espalier/base/simd.h"

namespace espalier::ESPALIER_SIMD {

// The value a store to T and a load would give: to nearest, ties to even. Stays within the float's 32 bits, which costs
// half of a conversion to 16 bits and back.
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

// sum_i term(i, count) over [0, width) in steps of kLanes<T>, where term gives 0 in lanes at and above count. Four
// vectors of partial sums: short dependency chains, and an error that grows with width/(4 lanes) instead of width.
template <class T, class Term>
ESPALIER_SIMD_INLINE accumulator_t<T> sum_over(std::int64_t width, Term term) {
  constexpr int kStep = kLanes<T>;
  Vector<T> sum0{}, sum1{}, sum2{}, sum3{};
  std::int64_t i = 0;
  for (; i + 4 * kStep <= width; i += 4 * kStep) {
    sum0 += term(i, kStep);
    sum1 += term(i + kStep, kStep);
    sum2 += term(i + 2 * kStep, kStep);
    sum3 += term(i + 3 * kStep, kStep);
  }
  for (; i + kStep <= width; i += kStep) sum0 += term(i, kStep);
  if (i < width) sum1 += term(i, static_cast<int>(width - i));
  return sum((sum0 + sum1) + (sum2 + sum3));
}

inline float inverse_root(float x) { return 1.0f / __builtin_sqrtf(x); }
inline double inverse_root(double x) { return 1.0 / __builtin_sqrt(x); }

}  // namespace espalier::ESPALIER_SIMD
