// tanh of vectors (base/simd.h): error below 8 units in the last place.
#pragma once

#include "espalier/base/simd.h"

namespace espalier::ESPALIER_SIMD {

// Near 0 by its series, which keeps small values exact; elsewhere (1 - e) / (1 + e), e = exp(-2 |x|), with x's sign.
template <class T>
ESPALIER_SIMD_INLINE Vector<T> tanh_of(Vector<T> x) {
  using A = accumulator_t<T>;
  const Vector<T> zero{}, e = exp(-2 * abs(x)), far = (1 - e) / (1 + e), y = x * x;
  constexpr A kSeries[] = {A(-443861162.0 / 1856156927625.0),
                           A(6404582.0 / 10854718875.0),
                           A(-929569.0 / 638512875.0),
                           A(21844.0 / 6081075.0),
                           A(-1382.0 / 155925.0),
                           A(62.0 / 2835.0),
                           A(-17.0 / 315.0),
                           A(2.0 / 15.0),
                           A(-1.0 / 3.0)};
  Vector<T> series = broadcast(kSeries[0]);
  for (int k = 1; k < 9; ++k) series = fma(series, y, kSeries[k]);
  const Vector<T> near = fma(x, y * series, x);
  return abs(x) < broadcast(A(0.15)) ? near : (x < zero ? -far : far);
}

}  // namespace espalier::ESPALIER_SIMD
