// The part of simd.h that is written with instructions of aarch64: NEON. Included by simd.h alone.
#pragma once

#include <arm_neon.h>

namespace espalier::ESPALIER_SIMD {

inline constexpr int kVectorRegisters = 32;
inline constexpr bool kMaskedMemory = false;

ESPALIER_SIMD_INLINE FloatVector sqrt(FloatVector a) {
  return reinterpret<FloatVector>(vsqrtq_f32(reinterpret<float32x4_t>(a)));
}
ESPALIER_SIMD_INLINE DoubleVector sqrt(DoubleVector a) {
  return reinterpret<DoubleVector>(vsqrtq_f64(reinterpret<float64x2_t>(a)));
}
ESPALIER_SIMD_INLINE FloatVector fma(FloatVector a, FloatVector b, FloatVector c) {
  return reinterpret<FloatVector>(
      vfmaq_f32(reinterpret<float32x4_t>(c), reinterpret<float32x4_t>(a), reinterpret<float32x4_t>(b)));
}
ESPALIER_SIMD_INLINE DoubleVector fma(DoubleVector a, DoubleVector b, DoubleVector c) {
  return reinterpret<DoubleVector>(
      vfmaq_f64(reinterpret<float64x2_t>(c), reinterpret<float64x2_t>(a), reinterpret<float64x2_t>(b)));
}

}  // namespace espalier::ESPALIER_SIMD
