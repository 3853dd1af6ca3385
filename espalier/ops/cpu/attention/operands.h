// Layouts of the factors of attention's products, and the products on them. Per instruction set (base/simd.h).
//
// PlainOperands<T>: factors are numbers of the accumulator type. PairedOperands (paired_operands.h): pairs of bfloat16.
// Both have the same members; k is the number of indices that a product sums over:
//   Factor, steps(k) factors hold k indices; rows(n): rows of sums computed where n are wanted
//   columns [steps(D)][W], lanes [steps(W)][padded]  right factors, sums over D and over lanes
//   keys [rows(n)][steps(D)], across               left factors, sums over D and over keys
//   by_key, by_lane                                 what a softmax leaves: right factor over keys, left over lanes
#pragma once

#include "espalier/ops/cpu/attention/panel.h"

namespace espalier::ESPALIER_SIMD {

// The destinations of a softmax's results; null if not needed.
template <class Factor>
struct WeightPlaces {
  Factor *by_key = nullptr, *by_lane = nullptr;
};

template <class T>
struct PlainOperands {
  using Element = T;
  using A = accumulator_t<T>;
  using Factor = A;
  using Products = VectorProducts;
  static constexpr Left kAcross = Left::rows_adjacent;  // across is the same layout as keys
  static constexpr bool kInPlace = true;                // weights overwrite scores, in both roles
  static constexpr int kKeyStep = 1;                    // blocks start at multiples of it
  static constexpr int kVectorStep = 1;

  static std::int64_t steps(std::int64_t k) { return k; }
  static std::int64_t rows(std::int64_t n) { return n; }
  // Keys that one panel multiplies at once: their block of scores and of values stays in the core's cache.
  static std::int64_t key_block(std::int64_t head_dim) {
    const std::int64_t keys = 65536 / static_cast<std::int64_t>(sizeof(A)) / head_dim;
    return keys >= Products::kKeys ? Products::kKeys : keys <= 48 ? 48 : keys / 12 * 12;
  }
  static std::int64_t across_size(std::int64_t block, std::int64_t head_dim) { return block * head_dim; }
  static std::int64_t across_stride(std::int64_t, std::int64_t head_dim) { return head_dim; }
  static const Factor* across_from(const Factor* across, std::int64_t key, std::int64_t head_dim) {
    return across + key * head_dim;
  }

  // to[d][lane] = factor * row of lane, element d.
  static void pack_columns(const Shape& shape, Rows<const T> rows, std::int64_t head, const Lanes& p, A factor,
                           Factor* to) {
    constexpr int n = kLanes<A>;
    for (int v = 0; v * n < p.count; ++v) {
      const LaneRows<const T, n> from(shape, rows, head, p, v * n);
      for_lanes<A>(shape.head_dim, [&](std::int64_t d, int count) {
        Vector<A> square[n];
        for (int r = 0; r < n; ++r) square[r] = from.row[r] ? load_some(from.row[r] + d, count) * factor : Vector<A>{};
        transpose<A>(square);
        for (int r = 0; r < count; ++r) store(to + (d + r) * kPanel<A> + v * n, square[r]);
      });
    }
  }
  // to[lane][d] = row of lane, element d.
  static void pack_lanes(const Shape& shape, Rows<const T> rows, std::int64_t head, const Lanes& p, Factor* to,
                         std::int64_t padded) {
    for (int lane = 0; lane < p.count; ++lane)
      copy_row(lane_row(shape, rows, head, p.first + lane), shape.head_dim, to + lane * padded, padded);
  }
  // Keys [first, end) of rows that start at `from`; to[j][d] for keys counted from 0.
  static void pack_keys(const T* from, std::int64_t stride, std::int64_t first, std::int64_t end, std::int64_t head_dim,
                        Factor* to) {
    for (std::int64_t j = first; j < end; ++j) copy_row(from + j * stride, head_dim, to + j * head_dim, head_dim);
  }
  static void pack_across(const T* from, std::int64_t stride, std::int64_t first, std::int64_t end, std::int64_t,
                          std::int64_t head_dim, Factor* to) {
    pack_keys(from, stride, first, end, head_dim, to);
  }

  // Weights of keys j and j + 1 of a panel's first `vectors` vectors.
  template <int vectors>
  ESPALIER_SIMD_INLINE static void keep(const WeightPlaces<Factor>& to, std::int64_t j,
                                        const Vector<A> (&weight)[2][vectors]) {
    if (!to.by_lane) return;
#pragma GCC unroll 2
    for (int k = 0; k < 2; ++k)
#pragma GCC unroll 8
      for (int v = 0; v < vectors; ++v) store(to.by_lane + (j + k) * kPanel<A> + v * kLanes<A>, weight[k][v]);
  }
  // Clears the padding that products read after n keys.
  static void clear_behind(const WeightPlaces<Factor>&, std::int64_t) {}
};

// Fills the two kinds of places with p = weigh(j, vector) and slope(j, vector, p), keys j in [0, n).
template <class O, int vectors, class Weigh, class Slope>
ESPALIER_SIMD_INLINE void keep_weights(const WeightPlaces<typename O::Factor>& weights,
                                       const WeightPlaces<typename O::Factor>& slopes, std::int64_t n, Weigh&& weigh,
                                       Slope&& slope) {
  using V = Vector<typename O::A>;
  for (std::int64_t j = 0; j < n; j += 2) {
    V p[2][vectors] = {}, s[2][vectors] = {};
#pragma GCC unroll 2
    for (int k = 0; k < 2; ++k) {
      if (j + k == n) break;
#pragma GCC unroll 8
      for (int v = 0; v < vectors; ++v) {
        p[k][v] = weigh(j + k, v);
        s[k][v] = slope(j + k, v, p[k][v]);
      }
    }
    O::template keep<vectors>(weights, j, p);
    O::template keep<vectors>(slopes, j, s);
  }
  O::clear_behind(weights, n);
  O::clear_behind(slopes, n);
}

}  // namespace espalier::ESPALIER_SIMD
