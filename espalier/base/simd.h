// Vectors of float and double, one width per instruction set, written with the vector extensions of GCC and Clang.
//
// For files listed in espalier_simd_sources only: they are compiled once per instruction set, with ESPALIER_SIMD
// naming the set and ESPALIER_SIMD_BYTES its width. Everything stands in namespace espalier::ESPALIER_SIMD, so the
// versions never meet at link time. Such files keep to raw pointers and to functions of that namespace: an
// inline function of std:: compiled for AVX-512 could be the copy that the linker gives to every caller.
//
// Operators + - * / < == & | of vectors work as they are. fma(a, b, c) is fused where the set has the instruction, and
// a * b + c never: what the compiler chose would depend on its version, on its level of optimisation, and on whether a
// value stands in a full vector or in the rest of a row.
// exp, exp2, log: error below 2 units in the last place (tests/unit/base/simd_test.cpp); polynomials are own fits at
// Chebyshev nodes, relative error below 1.1e-8 (float) and 2e-17 (double).
#pragma once

#include <cstdint>
#include <utility>

#include "espalier/base/dtype.h"

#if !defined(ESPALIER_SIMD) || !defined(ESPALIER_SIMD_BYTES)
#error "simd.h belongs into files compiled by espalier_simd_sources"
#endif
#define ESPALIER_SIMD_INLINE inline __attribute__((always_inline))

namespace espalier::ESPALIER_SIMD {

template <class T>
struct VectorType;
template <>
struct VectorType<float> {
  typedef float type __attribute__((vector_size(ESPALIER_SIMD_BYTES)));
  typedef std::int32_t integer __attribute__((vector_size(ESPALIER_SIMD_BYTES)));
  typedef std::uint32_t bits __attribute__((vector_size(ESPALIER_SIMD_BYTES)));
};
template <>
struct VectorType<double> {
  typedef double type __attribute__((vector_size(ESPALIER_SIMD_BYTES)));
  typedef std::int64_t integer __attribute__((vector_size(ESPALIER_SIMD_BYTES)));
  typedef std::uint64_t bits __attribute__((vector_size(ESPALIER_SIMD_BYTES)));
};

// The vector in which values of T are computed: floats for float and bfloat16, doubles for double.
template <class T>
using Vector = typename VectorType<accumulator_t<T>>::type;
template <class T>
using IntegerVector = typename VectorType<accumulator_t<T>>::integer;  // also what comparisons give
using FloatVector = Vector<float>;
using DoubleVector = Vector<double>;

// Values of T that one Vector<T> holds.
template <class T>
inline constexpr int kLanes = ESPALIER_SIMD_BYTES / static_cast<int>(sizeof(accumulator_t<T>));

template <class To, class From>
ESPALIER_SIMD_INLINE To reinterpret(From from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  __builtin_memcpy(&to, &from, sizeof(to));
  return to;
}

namespace detail {
template <int (*source)(int), class V, int... lane>
ESPALIER_SIMD_INLINE V shuffled(V a, V b, std::integer_sequence<int, lane...>) {
  return __builtin_shufflevector(a, b, source(lane)...);
}
}  // namespace detail
// Lane i of the result is lane source(i) of a and b, counted through a first.
template <int (*source)(int), class V>
ESPALIER_SIMD_INLINE V shuffled(V a, V b) {
  return detail::shuffled<source>(a, b, std::make_integer_sequence<int, sizeof(V) / sizeof(a[0])>{});
}

}  // namespace espalier::ESPALIER_SIMD

// The vector extensions lack these: kVectorRegisters, kMaskedMemory with load_masked and store_masked, sqrt, and fma
// (a * b + c: one rounding with AVX2, AVX-512 and NEON, two in the baseline set of x86-64).
#if defined(__x86_64__)
#include "espalier/base/simd_x86_64.h"
#else
#include "espalier/base/simd_aarch64.h"
#endif

namespace espalier::ESPALIER_SIMD {

ESPALIER_SIMD_INLINE FloatVector broadcast(float x) { return x - FloatVector{}; }
ESPALIER_SIMD_INLINE DoubleVector broadcast(double x) { return x - DoubleVector{}; }

// ---- memory: any alignment; the partial forms touch exactly `count` values, 0 <= count <= kLanes ----

namespace detail {
typedef std::uint16_t HalfBits __attribute__((vector_size(ESPALIER_SIMD_BYTES / 2)));
using WordBits = VectorType<float>::bits;

ESPALIER_SIMD_INLINE FloatVector widen(HalfBits bits) {
  return reinterpret<FloatVector>(__builtin_convertvector(bits, WordBits) << 16);
}
// To nearest, ties to even; NaN stays NaN.
ESPALIER_SIMD_INLINE HalfBits narrow(FloatVector value) {
  const WordBits raw = reinterpret<WordBits>(value);
  const WordBits rounded = (raw + 0x7fffu + ((raw >> 16) & 1u)) >> 16;
  const WordBits quiet = (raw >> 16) | 0x40u;
  return __builtin_convertvector(value == value ? rounded : quiet, HalfBits);
}
}  // namespace detail

ESPALIER_SIMD_INLINE FloatVector load(const float* from) {
  FloatVector v;
  __builtin_memcpy(&v, from, sizeof(v));
  return v;
}
ESPALIER_SIMD_INLINE DoubleVector load(const double* from) {
  DoubleVector v;
  __builtin_memcpy(&v, from, sizeof(v));
  return v;
}
ESPALIER_SIMD_INLINE FloatVector load(const bfloat16* from) {
  detail::HalfBits bits;
  __builtin_memcpy(&bits, from, sizeof(bits));
  return detail::widen(bits);
}
ESPALIER_SIMD_INLINE void store(float* to, FloatVector v) { __builtin_memcpy(to, &v, sizeof(v)); }
ESPALIER_SIMD_INLINE void store(double* to, DoubleVector v) { __builtin_memcpy(to, &v, sizeof(v)); }
ESPALIER_SIMD_INLINE void store(bfloat16* to, FloatVector v) {
  const detail::HalfBits bits = detail::narrow(v);
  __builtin_memcpy(static_cast<void*>(to), &bits, sizeof(bits));
}

// The first `count` values, the other lanes 0.
template <class T>
ESPALIER_SIMD_INLINE Vector<T> load_partial(const T* from, int count) {
  if constexpr (kMaskedMemory && sizeof(T) >= 4) {
    return load_masked(from, count);
  } else {
    T values[kLanes<T>];
    __builtin_memset(static_cast<void*>(values), 0, sizeof(values));
    for (int i = 0; i < count; ++i) __builtin_memcpy(static_cast<void*>(values + i), from + i, sizeof(T));
    return load(values);
  }
}
template <class T>
ESPALIER_SIMD_INLINE void store_partial(T* to, Vector<T> v, int count) {
  if constexpr (kMaskedMemory && sizeof(T) >= 4) {
    store_masked(to, v, count);
  } else {
    unsigned char values[kLanes<T> * sizeof(T)];
    store(reinterpret_cast<T*>(values), v);
    for (int i = 0; i < count; ++i) __builtin_memcpy(static_cast<void*>(to + i), values + i * sizeof(T), sizeof(T));
  }
}

// Calls body(index, count) for [0, n) in steps of kLanes<T>; count is below kLanes<T> in the last call only.
//   for_lanes<float>(n, [&](std::int64_t i, int count) { store_some(y + i, exp(load_some(x + i, count)), count); });
// load_some and store_some take the full form where count fills the vector.
template <class T, class Body>
ESPALIER_SIMD_INLINE void for_lanes(std::int64_t n, Body&& body) {
  std::int64_t i = 0;
  for (; i + kLanes<T> <= n; i += kLanes<T>) body(i, kLanes<T>);
  if (i < n) body(i, static_cast<int>(n - i));
}
template <class T>
ESPALIER_SIMD_INLINE Vector<T> load_some(const T* from, int count) {
  return count == kLanes<T> ? load(from) : load_partial(from, count);
}
template <class T>
ESPALIER_SIMD_INLINE void store_some(T* to, Vector<T> v, int count) {
  if (count == kLanes<T>)
    store(to, v);
  else
    store_partial(to, v, count);
}

// ---- arithmetic ----

#if defined(__FMA__) || defined(__ARM_FEATURE_FMA)
ESPALIER_SIMD_INLINE float fma(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
ESPALIER_SIMD_INLINE double fma(double a, double b, double c) { return __builtin_fma(a, b, c); }
#else
ESPALIER_SIMD_INLINE float fma(float a, float b, float c) { return a * b + c; }
ESPALIER_SIMD_INLINE double fma(double a, double b, double c) { return a * b + c; }
#endif
namespace detail {
template <class V, class X>
ESPALIER_SIMD_INLINE V spread(X x) {
  if constexpr (sizeof(X) == sizeof(V))
    return x;
  else
    return broadcast(static_cast<decltype(V{}[0] + V{}[0])>(x));
}
}  // namespace detail
// A scalar b or c stands for all lanes.
template <class V, class B, class C>
requires(sizeof(V) == ESPALIER_SIMD_BYTES) ESPALIER_SIMD_INLINE V fma(V a, B b, C c) {
  return fma(a, detail::spread<V>(b), detail::spread<V>(c));
}
// The second argument where either is NaN.
ESPALIER_SIMD_INLINE FloatVector max(FloatVector a, FloatVector b) { return a > b ? a : b; }
ESPALIER_SIMD_INLINE DoubleVector max(DoubleVector a, DoubleVector b) { return a > b ? a : b; }
ESPALIER_SIMD_INLINE FloatVector min(FloatVector a, FloatVector b) { return a < b ? a : b; }
ESPALIER_SIMD_INLINE DoubleVector min(DoubleVector a, DoubleVector b) { return a < b ? a : b; }
ESPALIER_SIMD_INLINE FloatVector abs(FloatVector a) {
  return reinterpret<FloatVector>(reinterpret<VectorType<float>::bits>(a) & 0x7fffffffu);
}
ESPALIER_SIMD_INLINE DoubleVector abs(DoubleVector a) {
  return reinterpret<DoubleVector>(reinterpret<VectorType<double>::bits>(a) & 0x7fffffffffffffffull);
}

// Lanes 0, 1, 2, ... as numbers.
ESPALIER_SIMD_INLINE FloatVector lane_numbers(float) {
  FloatVector v{};
  for (int i = 0; i < kLanes<float>; ++i) v[i] = static_cast<float>(i);
  return v;
}
ESPALIER_SIMD_INLINE DoubleVector lane_numbers(double) {
  DoubleVector v{};
  for (int i = 0; i < kLanes<double>; ++i) v[i] = static_cast<double>(i);
  return v;
}

namespace detail {
template <class S, int bytes>
struct Narrower {
  typedef S type __attribute__((vector_size(bytes)));
};

// Folds the upper half of the lanes onto the lower half until one is left.
template <class V, class Fold>
ESPALIER_SIMD_INLINE auto fold_lanes(V v, Fold fold) {
  using S = decltype(v[0] + v[0]);
  if constexpr (sizeof(V) == 2 * sizeof(S)) {
    return fold(S(v[0]), S(v[1]));
  } else if constexpr (sizeof(V) == 16) {
    const V swapped = {v[2], v[3], v[0], v[1]};
    const V pairs = fold(v, swapped);
    return fold(S(pairs[0]), S(pairs[1]));
  } else {
    struct Halves {
      typename Narrower<S, sizeof(V) / 2>::type low, high;
    };
    const auto halves = reinterpret<Halves>(v);
    return fold_lanes(fold(halves.low, halves.high), fold);
  }
}
struct Add {
  template <class A>
  ESPALIER_SIMD_INLINE A operator()(A a, A b) const {
    return a + b;
  }
};
struct Larger {
  template <class A>
  ESPALIER_SIMD_INLINE A operator()(A a, A b) const {
    return a > b ? a : b;
  }
};
}  // namespace detail

ESPALIER_SIMD_INLINE float sum(FloatVector v) { return detail::fold_lanes(v, detail::Add{}); }
ESPALIER_SIMD_INLINE double sum(DoubleVector v) { return detail::fold_lanes(v, detail::Add{}); }
ESPALIER_SIMD_INLINE float max_of(FloatVector v) { return detail::fold_lanes(v, detail::Larger{}); }
ESPALIER_SIMD_INLINE double max_of(DoubleVector v) { return detail::fold_lanes(v, detail::Larger{}); }

// ---- exponentials and logarithms ----

namespace detail {
// Adding it rounds to the nearest integer, which then stands in the low bits.
inline constexpr float kRoundF = 12582912.0f;          // 1.5 * 2^23
inline constexpr double kRoundD = 6755399441055744.0;  // 1.5 * 2^52

// value * 2^n in two steps, so that results below the normal range and above it come out right.
ESPALIER_SIMD_INLINE FloatVector scale_by_power(FloatVector value, IntegerVector<float> n) {
  const IntegerVector<float> half = n >> 1;
  return value * reinterpret<FloatVector>((half + 127) << 23) * reinterpret<FloatVector>((n - half + 127) << 23);
}
ESPALIER_SIMD_INLINE DoubleVector scale_by_power(DoubleVector value, IntegerVector<double> n) {
  const IntegerVector<double> half = n >> 1;
  return value * reinterpret<DoubleVector>((half + 1023) << 52) * reinterpret<DoubleVector>((n - half + 1023) << 52);
}
// ((first r + next_0) r + next_1) ...
template <class V, class S, class... Next>
ESPALIER_SIMD_INLINE V horner(V r, S first, Next... next) {
  V p = broadcast(first);
  ((p = fma(p, r, next)), ...);
  return p;
}
// 2^r for |r| <= 1/2.
ESPALIER_SIMD_INLINE FloatVector exp2_fraction(FloatVector r) {
  return horner(r, 0.000154532623f, 0.00133909786f, 0.00961808208f, 0.0555035695f, 0.240226507f, 0.693147182f, 1.0f);
}
ESPALIER_SIMD_INLINE DoubleVector exp2_fraction(DoubleVector r) {
  return horner(r, 4.4549794711760616e-10, 7.072621356539349e-09, 1.0178062351388103e-07, 1.3215442410711872e-06,
                1.525273382999124e-05, 0.0001540353044202707, 0.0013333558146416842, 0.009618129107606715,
                0.0555041086648216, 0.24022650695910097, 0.6931471805599453, 1.0);
}
// e^r for |r| <= ln(2) / 2.
ESPALIER_SIMD_INLINE FloatVector exp_fraction(FloatVector r) {
  return fma(horner(r, 0.00139262504f, 0.00836323295f, 0.0416665524f, 0.166665763f, 0.5f), r * r, r) + 1.0f;
}
ESPALIER_SIMD_INLINE DoubleVector exp_fraction(DoubleVector r) {
  return fma(horner(r, 2.5100472505694996e-08, 2.7620201591031547e-07, 2.7557268276905696e-06, 2.4801521057868204e-05,
                    0.00019841269863171557, 0.0013888888917367081, 0.008333333333330039, 0.041666666666623824,
                    0.16666666666666669, 0.5000000000000001),
             r * r, r) +
         1.0;
}
}  // namespace detail

// e^x: 0 for -inf and below the smallest subnormal, inf above the range, NaN for NaN.
ESPALIER_SIMD_INLINE FloatVector exp(FloatVector x) {
  const FloatVector low = broadcast(-110.0f), high = broadcast(100.0f);
  x = x < low ? low : x;
  x = x > high ? high : x;
  const FloatVector shifted = fma(x, 1.44269504f, detail::kRoundF);
  const FloatVector n = shifted - detail::kRoundF;
  const FloatVector r = fma(n, 2.12194440e-4f, fma(-n, 0.693359375f, x));
  const auto power = reinterpret<IntegerVector<float>>(shifted) - __builtin_bit_cast(std::int32_t, detail::kRoundF);
  return detail::scale_by_power(detail::exp_fraction(r), power);
}
ESPALIER_SIMD_INLINE DoubleVector exp(DoubleVector x) {
  const DoubleVector low = broadcast(-760.0), high = broadcast(720.0);
  x = x < low ? low : x;
  x = x > high ? high : x;
  const DoubleVector shifted = fma(x, 1.4426950408889634, detail::kRoundD);
  const DoubleVector n = shifted - detail::kRoundD;
  const DoubleVector r = fma(-n, 1.90821492927058770002e-10, fma(-n, 0.693147180369123816490, x));
  const auto power = reinterpret<IntegerVector<double>>(shifted) - __builtin_bit_cast(std::int64_t, detail::kRoundD);
  return detail::scale_by_power(detail::exp_fraction(r), power);
}

// 2^x, with the same treatment of the ends.
ESPALIER_SIMD_INLINE FloatVector exp2(FloatVector x) {
  const FloatVector low = broadcast(-160.0f), high = broadcast(130.0f);
  x = x < low ? low : x;
  x = x > high ? high : x;
  const FloatVector shifted = x + detail::kRoundF;
  const auto power = reinterpret<IntegerVector<float>>(shifted) - __builtin_bit_cast(std::int32_t, detail::kRoundF);
  return detail::scale_by_power(detail::exp2_fraction(x - (shifted - detail::kRoundF)), power);
}
ESPALIER_SIMD_INLINE DoubleVector exp2(DoubleVector x) {
  const DoubleVector low = broadcast(-1100.0), high = broadcast(1030.0);
  x = x < low ? low : x;
  x = x > high ? high : x;
  const DoubleVector shifted = x + detail::kRoundD;
  const auto power = reinterpret<IntegerVector<double>>(shifted) - __builtin_bit_cast(std::int64_t, detail::kRoundD);
  return detail::scale_by_power(detail::exp2_fraction(x - (shifted - detail::kRoundD)), power);
}

// e^x for x <= 1, the softmax case, in fewer instructions: results below the normal range are 0, and the error grows to
// 2 + |x| / 4 units in the last place (2 + 3 |x| without fused products).
ESPALIER_SIMD_INLINE FloatVector exp_nonpositive(FloatVector x) {
  const FloatVector low = broadcast(-88.0f);  // n = -127, exponent field 0: multiplies by 0
  x = x < low ? low : x;
  const FloatVector shifted = fma(x, 1.44269504f, detail::kRoundF);
  constexpr std::int32_t bias = __builtin_bit_cast(std::int32_t, detail::kRoundF) - 127;
  const auto power = reinterpret<IntegerVector<float>>(shifted) - bias;
  const FloatVector r = fma(x, 1.44269504f, detail::kRoundF - shifted);
  return detail::exp2_fraction(r) * reinterpret<FloatVector>(power << 23);
}
ESPALIER_SIMD_INLINE DoubleVector exp_nonpositive(DoubleVector x) {
  const DoubleVector low = broadcast(-709.0);
  x = x < low ? low : x;
  const DoubleVector shifted = fma(x, 1.4426950408889634, detail::kRoundD);
  constexpr std::int64_t bias = __builtin_bit_cast(std::int64_t, detail::kRoundD) - 1023;
  const auto power = reinterpret<IntegerVector<double>>(shifted) - bias;
  const DoubleVector r = fma(x, 1.4426950408889634, detail::kRoundD - shifted);
  return detail::exp2_fraction(r) * reinterpret<DoubleVector>(power << 52);
}

// e^(x scale) as 2^n p with a whole number n and p near 1, both of x and scale alone, so that terms of different n come
// to one power of two without rounding: n = whole_exponent(x, scale log2 e), p = exp_mantissa(x, scale, n).
template <class V, class S>
ESPALIER_SIMD_INLINE V whole_exponent(V x, S scale_log2_e) {
  constexpr S round = sizeof(S) == 4 ? S(detail::kRoundF) : S(detail::kRoundD);
  return fma(x, scale_log2_e, round) - round;
}
template <class V, class S>
ESPALIER_SIMD_INLINE V exp_mantissa(V x, S scale, V n) {
  constexpr S high = sizeof(S) == 4 ? S(0.693359375) : S(0.693147180369123816490);
  constexpr S low = sizeof(S) == 4 ? S(-2.12194440e-4) : S(1.90821492927058770002e-10);
  const V of_power = n * high;  // exact
  return detail::exp_fraction(fma(-n, low, fma(x, scale, -of_power)));
}
// log(2^n p) = n log 2 + log p, from log p.
template <class V>
ESPALIER_SIMD_INLINE V log_of_power(V n, V log_p) {
  using S = decltype(n[0] + n[0]);
  constexpr S high = sizeof(S) == 4 ? S(0.693359375) : S(0.693147180369123816490);
  constexpr S low = sizeof(S) == 4 ? S(-2.12194440e-4) : S(1.90821492927058770002e-10);
  return fma(n, high, fma(n, low, log_p));
}
// p 2^n for whole n <= 0; 0, whatever p is, where 2^n is below the normal range.
ESPALIER_SIMD_INLINE FloatVector times_power(FloatVector p, FloatVector n) {
  constexpr std::int32_t bias = __builtin_bit_cast(std::int32_t, detail::kRoundF) - 127;
  const auto bits = reinterpret<IntegerVector<float>>(n + detail::kRoundF) - bias;
  return n < -126.5f ? FloatVector{} : p * reinterpret<FloatVector>(bits << 23);
}
ESPALIER_SIMD_INLINE DoubleVector times_power(DoubleVector p, DoubleVector n) {
  constexpr std::int64_t bias = __builtin_bit_cast(std::int64_t, detail::kRoundD) - 1023;
  const auto bits = reinterpret<IntegerVector<double>>(n + detail::kRoundD) - bias;
  return n < -1022.5 ? DoubleVector{} : p * reinterpret<DoubleVector>(bits << 52);
}

namespace detail {
// log(2^k * (1 + f)), s = f / (2 + f): log(1 + f) = f - f^2/2 + s (f^2/2 + R(s^2)), where
// R(s^2) = series z is the series of 2 atanh(s)/s - 2.
template <class V>
ESPALIER_SIMD_INLINE V log_parts(V k, V f, V series, V z, V s, double ln2_high, double ln2_low) {
  using S = decltype(f[0] + f[0]);
  const V half_square = f * f * static_cast<S>(0.5);
  const V of_s = fma(s, fma(series, z, half_square), k * static_cast<S>(ln2_low));
  return fma(k, static_cast<S>(ln2_high), f - (half_square - of_s));
}
}  // namespace detail

// Natural logarithm: -inf for 0, NaN below 0, inf for inf; subnormal arguments are right.
ESPALIER_SIMD_INLINE FloatVector log(FloatVector x) {
  using I = IntegerVector<float>;
  const I tiny = x < 1.17549435e-38f;
  const FloatVector scaled = tiny ? x * 8388608.0f : x;
  const I raw = reinterpret<I>(scaled);
  const I above = (raw & 0x7fffff) > 0x3504f3;  // mantissa above sqrt(2): halved
  const I exponent = (raw >> 23) - 127 - above - (tiny & 23);
  const FloatVector m = reinterpret<FloatVector>((raw & 0x7fffff) | (above ? I{} + 0x3f000000 : I{} + 0x3f800000));
  const FloatVector f = m - 1.0f, s = f / (f + 2.0f), z = s * s;
  FloatVector series = broadcast(2.0f / 11);
#pragma GCC unroll 4
  for (int d = 9; d >= 3; d -= 2) series = fma(series, z, 2.0f / static_cast<float>(d));
  FloatVector y = detail::log_parts(__builtin_convertvector(exponent, FloatVector), f, series, z, s, 6.9313812256e-01,
                                    9.0580006145e-06);
  const FloatVector inf = broadcast(__builtin_inff());
  y = x == inf ? inf : y;
  y = x == 0.0f ? -inf : y;
  return x >= 0.0f ? y : broadcast(__builtin_nanf(""));
}
ESPALIER_SIMD_INLINE DoubleVector log(DoubleVector x) {
  using I = IntegerVector<double>;
  const I tiny = x < 2.2250738585072014e-308;
  const DoubleVector scaled = tiny ? x * 4503599627370496.0 : x;
  const I raw = reinterpret<I>(scaled);
  const I mantissa = raw & 0xfffffffffffffll;
  const I above = mantissa > 0x6a09e667f3bcdll;
  const I exponent = (raw >> 52) - 1023 - above - (tiny & 52);
  const DoubleVector m =
      reinterpret<DoubleVector>(mantissa | (above ? I{} + 0x3fe0000000000000ll : I{} + 0x3ff0000000000000ll));
  const DoubleVector f = m - 1.0, s = f / (f + 2.0), z = s * s;
  DoubleVector series = broadcast(2.0 / 25);
#pragma GCC unroll 12
  for (int d = 23; d >= 3; d -= 2) series = fma(series, z, 2.0 / d);
  DoubleVector y = detail::log_parts(__builtin_convertvector(exponent, DoubleVector), f, series, z, s,
                                     6.93147180369123816490e-01, 1.90821492927058770002e-10);
  const DoubleVector inf = broadcast(__builtin_inf());
  y = x == inf ? inf : y;
  y = x == 0.0 ? -inf : y;
  return x >= 0.0 ? y : broadcast(__builtin_nan(""));
}

}  // namespace espalier::ESPALIER_SIMD
