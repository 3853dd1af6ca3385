// Moves rows into vectors and back. Per instruction set (see base/simd.h).
#pragma once

#include "espalier/ops/cpu/attention/places.h"

namespace espalier::ESPALIER_SIMD {

// Copies one row as accumulator numbers; columns after D, up to `stride`, become 0 as far as vectors reach.
template <class T>
ESPALIER_SIMD_INLINE void copy_row(const T* from, std::int64_t head_dim, accumulator_t<T>* to, std::int64_t stride) {
  for_lanes<T>(head_dim, [&](std::int64_t d, int count) {
    const Vector<T> v = load_some(from + d, count);
    if (d + kLanes<T> <= stride)
      store(to + d, v);
    else
      store_partial(to + d, v, count);
  });
}

// Where the lanes come from when the halves of two vectors of n lanes interleave.
template <int n>
constexpr int first_halves(int lane) {
  return lane / 2 + (lane % 2) * n;
}
template <int n>
constexpr int second_halves(int lane) {
  return n / 2 + first_halves<n>(lane);
}

// Transposes a square of kLanes x kLanes by rounds of interleaving row i with row i + kLanes / 2.
template <class A>
ESPALIER_SIMD_INLINE void transpose(Vector<A> (&x)[kLanes<A>]) {
  constexpr int n = kLanes<A>;
#pragma GCC unroll 5
  for (int round = 1; round < n; round *= 2) {
    Vector<A> y[n];
#pragma GCC unroll 16
    for (int i = 0; i < n / 2; ++i) {
      y[2 * i] = shuffled<first_halves<n>>(x[i], x[i + n / 2]);
      y[2 * i + 1] = shuffled<second_halves<n>>(x[i], x[i + n / 2]);
    }
#pragma GCC unroll 16
    for (int i = 0; i < n; ++i) x[i] = y[i];
  }
}

// Overwrites element d of each lane's row with from[d][lane] * factor[lane].
template <class T>
void unpack_panel(const Shape& shape, const accumulator_t<T>* from, const accumulator_t<T>* factor, std::int64_t head,
                  const Lanes& p, Rows<T> rows) {
  using A = accumulator_t<T>;
  constexpr int n = kLanes<A>;
  for (int v = 0; v * n < p.count; ++v) {
    const Vector<A> by = load(factor + v * n);
    const LaneRows<T, n> to(shape, rows, head, p, v * n);
    for_lanes<A>(shape.head_dim, [&](std::int64_t d, int count) {
      Vector<A> square[n];
      for (int r = 0; r < n; ++r) square[r] = r < count ? load(from + (d + r) * kPanel<A> + v * n) * by : Vector<A>{};
      transpose<A>(square);
      for (int r = 0; r < n && to.row[r]; ++r) store_some(to.row[r] + d, square[r], count);
    });
  }
}

// to += factor * from, row by row.
template <class A>
void add_rows(std::int64_t n, std::int64_t width, const A* from, std::int64_t stride, A factor, A* to,
              std::int64_t to_stride) {
  for (std::int64_t j = 0; j < n; ++j)
    for_lanes<A>(width, [&](std::int64_t d, int count) {
      A* at = to + j * to_stride + d;
      store_some(at, fma(load(from + j * stride + d), factor, load_some(at, count)), count);
    });
}

}  // namespace espalier::ESPALIER_SIMD
