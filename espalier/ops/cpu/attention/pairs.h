// Pairs of bfloat16 as factors of float32 sums: the AVX512_BF16 instructions. Per instruction set (see base/simd.h);
// empty in sets without them.
//
//   c + a . b per 32-bit lane: c + (a.low * b.low + a.high * b.high), sums in float32, no product rounded to bfloat16.
// Rounding to bfloat16 is to nearest, ties to even; the instructions treat subnormal numbers as 0.
#pragma once

#include "espalier/base/simd.h"

#ifdef __AVX512BF16__
namespace espalier::ESPALIER_SIMD {

// Two bfloat16 that are neighbours along the dimension of summation; the first is in the low half.
enum class Pair : std::uint32_t {};
using Pairs = IntegerVector<float>;

ESPALIER_SIMD_INLINE Pairs load(const Pair* from) {
  Pairs v;
  __builtin_memcpy(&v, from, sizeof(v));
  return v;
}
ESPALIER_SIMD_INLINE void store(Pair* to, Pairs v) { __builtin_memcpy(static_cast<void*>(to), &v, sizeof(v)); }
ESPALIER_SIMD_INLINE Pairs broadcast(Pair x) { return static_cast<std::int32_t>(x) - Pairs{}; }
ESPALIER_SIMD_INLINE FloatVector fma(Pairs a, Pairs b, FloatVector c) {
  return reinterpret<FloatVector>(
      _mm512_dpbf16_ps(reinterpret<__m512>(c), reinterpret<__m512bh>(a), reinterpret<__m512bh>(b)));
}

// Pairs of adjacent numbers: low[0], low[1], ..., high[0], high[1], ...
ESPALIER_SIMD_INLINE Pairs rounded_pairs(FloatVector low, FloatVector high) {
  return reinterpret<Pairs>(_mm512_cvtne2ps_pbh(reinterpret<__m512>(high), reinterpret<__m512>(low)));
}
// Pairs (low[0], high[0]), (low[1], high[1]), ... from the first and second half of adjacent numbers.
ESPALIER_SIMD_INLINE Pairs interleave(Pairs adjacent) {
  typedef std::int16_t Halves __attribute__((vector_size(ESPALIER_SIMD_BYTES)));
  Halves order{};
  for (int i = 0; i < kLanes<float>; ++i) {
    order[2 * i] = static_cast<std::int16_t>(i);
    order[2 * i + 1] = static_cast<std::int16_t>(i + kLanes<float>);
  }
  return reinterpret<Pairs>(_mm512_permutexvar_epi16(reinterpret<__m512i>(order), reinterpret<__m512i>(adjacent)));
}

}  // namespace espalier::ESPALIER_SIMD
#endif
