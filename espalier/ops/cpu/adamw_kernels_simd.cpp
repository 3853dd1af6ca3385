// AdamW and the sum of squares over one block; loops that the compiler vectorises, compiled for each instruction set.
//
// Multiply-adds are fused where torch's own vector code does so, and the results have torch's bits. Nothing here may
// have external linkage outside the set's namespace.
#include "espalier/base/simd.h"
#include "espalier/ops/cpu/adamw_ranges.h"

namespace espalier::ESPALIER_SIMD {
namespace {

inline float root(float x) { return __builtin_sqrtf(x); }
inline double root(double x) { return __builtin_sqrt(x); }

// To nearest, ties to even; NaN stays NaN. Written without a branch so that the loop stays a vector loop.
inline std::uint16_t bfloat16_bits(float value) {
  const std::uint32_t raw = __builtin_bit_cast(std::uint32_t, value);
  const std::uint32_t nearest = (raw + 0x7fffu + ((raw >> 16) & 1u)) >> 16;
  return static_cast<std::uint16_t>((raw & 0x7fffffffu) > 0x7f800000u ? (raw >> 16) | 0x40u : nearest);
}

// Sixteen lanes whatever the vector width, so that the order of additions is the same in every set.
template <class T>
double sum_of_squares(std::int64_t count, const T* x) {
  constexpr int kLanes = 16;
  double lane[kLanes] = {};
  const std::int64_t whole = count - count % kLanes;
  for (std::int64_t i = 0; i < whole; i += kLanes) {
    for (int l = 0; l < kLanes; ++l) {
      const double value = static_cast<double>(x[i + l]);
      lane[l] += value * value;
    }
  }
  for (std::int64_t i = whole; i < count; ++i) {
    const double value = static_cast<double>(x[i]);
    lane[i - whole] += value * value;
  }
  for (int half = kLanes / 2; half > 0; half /= 2)
    for (int l = 0; l < half; ++l) lane[l] += lane[l + half];
  return lane[0];
}

template <class T, bool kRounded>
void adamw_loop(std::int64_t count, T* __restrict p, const T* __restrict grad, T* __restrict m, T* __restrict v,
                const AdamWFactors<T>& factors, bfloat16* __restrict rounded) {
  const AdamWFactors<T> f = factors;
  // torch's lerp starts from the nearer end; a small weight is the usual case.
  const bool small = f.lerp_weight < T(0.5);
  const T coefficient = small ? f.lerp_weight : f.lerp_weight - T(1);
#pragma omp simd
  for (std::int64_t i = 0; i < count; ++i) {
    const T g = grad[i] * f.grad_scale;
    const T decayed = p[i] * f.decay;
    const T first = fma(coefficient, g - m[i], small ? m[i] : g);
    const T second = fma(f.one_minus_beta2 * g, g, v[i] * f.beta2);
    const T denominator = root(second) / f.correction2_root + f.eps;
    const T updated = decayed + f.minus_step_size * first / denominator;
    p[i] = updated;
    m[i] = first;
    v[i] = second;
    if constexpr (kRounded) rounded[i].bits = bfloat16_bits(static_cast<float>(updated));
  }
}

template <class T>
void adamw(std::int64_t count, T* p, const T* grad, T* m, T* v, const AdamWFactors<T>& factors, bfloat16* rounded) {
  if (rounded != nullptr)
    adamw_loop<T, true>(count, p, grad, m, v, factors, rounded);
  else
    adamw_loop<T, false>(count, p, grad, m, v, factors, rounded);
}

}  // namespace

template <class T>
AdamWRanges<T> adamw_ranges() {
  return {sum_of_squares<T>, adamw<T>};
}
template AdamWRanges<float> adamw_ranges<float>();
template AdamWRanges<double> adamw_ranges<double>();

}  // namespace espalier::ESPALIER_SIMD
