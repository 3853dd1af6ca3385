// The part of simd.h that is written with instructions of x86-64; included by it alone. The width tells the sets apart:
// baseline (SSE2), avx2, avx512.
#pragma once

#include <immintrin.h>

namespace espalier::ESPALIER_SIMD {

inline constexpr int kVectorRegisters = ESPALIER_SIMD_BYTES == 64 ? 32 : 16;

#if ESPALIER_SIMD_BYTES == 64
inline constexpr bool kMaskedMemory = true;
ESPALIER_SIMD_INLINE FloatVector load_masked(const float* from, int count) {
  return reinterpret<FloatVector>(_mm512_maskz_loadu_ps(static_cast<__mmask16>((1u << count) - 1u), from));
}
ESPALIER_SIMD_INLINE DoubleVector load_masked(const double* from, int count) {
  return reinterpret<DoubleVector>(_mm512_maskz_loadu_pd(static_cast<__mmask8>((1u << count) - 1u), from));
}
ESPALIER_SIMD_INLINE void store_masked(float* to, FloatVector v, int count) {
  _mm512_mask_storeu_ps(to, static_cast<__mmask16>((1u << count) - 1u), reinterpret<__m512>(v));
}
ESPALIER_SIMD_INLINE void store_masked(double* to, DoubleVector v, int count) {
  _mm512_mask_storeu_pd(to, static_cast<__mmask8>((1u << count) - 1u), reinterpret<__m512d>(v));
}
ESPALIER_SIMD_INLINE FloatVector sqrt(FloatVector a) {
  return reinterpret<FloatVector>(_mm512_maskz_sqrt_ps(0xffff, reinterpret<__m512>(a)));
}
ESPALIER_SIMD_INLINE DoubleVector sqrt(DoubleVector a) {
  return reinterpret<DoubleVector>(_mm512_maskz_sqrt_pd(0xff, reinterpret<__m512d>(a)));
}
ESPALIER_SIMD_INLINE FloatVector fma(FloatVector a, FloatVector b, FloatVector c) {
  return reinterpret<FloatVector>(
      _mm512_fmadd_ps(reinterpret<__m512>(a), reinterpret<__m512>(b), reinterpret<__m512>(c)));
}
ESPALIER_SIMD_INLINE DoubleVector fma(DoubleVector a, DoubleVector b, DoubleVector c) {
  return reinterpret<DoubleVector>(
      _mm512_fmadd_pd(reinterpret<__m512d>(a), reinterpret<__m512d>(b), reinterpret<__m512d>(c)));
}
#else
inline constexpr bool kMaskedMemory = false;
#if ESPALIER_SIMD_BYTES == 32
ESPALIER_SIMD_INLINE FloatVector sqrt(FloatVector a) {
  return reinterpret<FloatVector>(_mm256_sqrt_ps(reinterpret<__m256>(a)));
}
ESPALIER_SIMD_INLINE DoubleVector sqrt(DoubleVector a) {
  return reinterpret<DoubleVector>(_mm256_sqrt_pd(reinterpret<__m256d>(a)));
}
ESPALIER_SIMD_INLINE FloatVector fma(FloatVector a, FloatVector b, FloatVector c) {
  return reinterpret<FloatVector>(
      _mm256_fmadd_ps(reinterpret<__m256>(a), reinterpret<__m256>(b), reinterpret<__m256>(c)));
}
ESPALIER_SIMD_INLINE DoubleVector fma(DoubleVector a, DoubleVector b, DoubleVector c) {
  return reinterpret<DoubleVector>(
      _mm256_fmadd_pd(reinterpret<__m256d>(a), reinterpret<__m256d>(b), reinterpret<__m256d>(c)));
}
#else
ESPALIER_SIMD_INLINE FloatVector sqrt(FloatVector a) {
  return reinterpret<FloatVector>(_mm_sqrt_ps(reinterpret<__m128>(a)));
}
ESPALIER_SIMD_INLINE DoubleVector sqrt(DoubleVector a) {
  return reinterpret<DoubleVector>(_mm_sqrt_pd(reinterpret<__m128d>(a)));
}
ESPALIER_SIMD_INLINE FloatVector fma(FloatVector a, FloatVector b, FloatVector c) { return a * b + c; }
ESPALIER_SIMD_INLINE DoubleVector fma(DoubleVector a, DoubleVector b, DoubleVector c) { return a * b + c; }
#endif
#endif

}  // namespace espalier::ESPALIER_SIMD
