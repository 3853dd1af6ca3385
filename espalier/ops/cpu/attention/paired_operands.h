// Operands of attention that multiplies bfloat16 directly, with float32 sums: factors are pairs (pairs.h).
//
// Rounded to bfloat16, to nearest: the weights P before P V and P^T dO, the slopes dS before dS K and dS^T Q. Their
// sums, lse, D and all gradients of keys and values are float32; the row sums of P are of unrounded numbers.
// A pair runs along the direction summed over, so the right factors interleave two rows:
//   columns (d, d + 1)[d / 2][lane], lanes (lane, lane + 1)[lane / 2][d], by_key (j, j + 1)[j / 2][lane]
// and the left ones are plain rows of bfloat16: keys [j][d], across [d][j], by_lane [j][lane].
#pragma once

#include "espalier/ops/cpu/attention/operands.h"

namespace espalier::ESPALIER_SIMD {

// Numbers [0, count) of a row, 0 <= count <= 2 kLanes; the others 0.
ESPALIER_SIMD_INLINE Pairs load_pairs(const bfloat16* from, std::int64_t count) {
  const __mmask32 mask = count >= 32 ? ~__mmask32{0} : (__mmask32{1} << count) - 1;
  return reinterpret<Pairs>(_mm512_maskz_loadu_epi16(mask, from));
}
// (low[i], high[i]) for i in [0, count), count <= kLanes; a null row is all 0.
ESPALIER_SIMD_INLINE Pairs load_two(const bfloat16* low, const bfloat16* high, std::int64_t count) {
  const auto mask = static_cast<__mmask16>(count >= 16 ? 0xffffu : (1u << count) - 1u);
  const auto words = [&](const bfloat16* row) {
    const __m256i halves = row ? _mm256_maskz_loadu_epi16(mask, row) : _mm256_setzero_si256();
    return __builtin_convertvector(reinterpret<detail::HalfBits>(halves), Pairs);
  };
  return words(low) | words(high) << 16;
}
ESPALIER_SIMD_INLINE void store_pairs(Pair* to, Pairs v, std::int64_t count) {
  const auto mask = static_cast<__mmask16>(count >= 16 ? 0xffffu : (1u << count) - 1u);
  _mm512_mask_storeu_epi32(to, mask, reinterpret<__m512i>(v));
}
ESPALIER_SIMD_INLINE void transpose_pairs(Pairs (&square)[kLanes<float>]) {
  FloatVector x[kLanes<float>];  // moved, never computed with
  for (int r = 0; r < kLanes<float>; ++r) x[r] = reinterpret<FloatVector>(square[r]);
  transpose<float>(x);
  for (int r = 0; r < kLanes<float>; ++r) square[r] = reinterpret<Pairs>(x[r]);
}

template <class P>
struct PairedOperands {
  using Element = bfloat16;
  using A = float;
  using Factor = Pair;
  using Products = P;
  static constexpr Left kAcross = Left::steps_adjacent;
  static constexpr bool kInPlace = false;
  static constexpr int kKeyStep = 2;
  static constexpr int kVectorStep = P::kVectors;
  static constexpr int n = kLanes<float>, W = kPanel<float>;

  static std::int64_t steps(std::int64_t k) { return round_up(ceil_div(k, 2), P::kSteps); }
  static std::int64_t rows(std::int64_t count) { return round_up(count, P::kRows); }
  static std::int64_t key_block(std::int64_t) { return P::kKeys; }
  // Sums that start inside the block may take their last step after it.
  static std::int64_t across_stride(std::int64_t block, std::int64_t) { return steps(block + 2 * (P::kSteps - 1)); }
  static std::int64_t across_size(std::int64_t block, std::int64_t head_dim) {
    return rows(head_dim) * across_stride(block, head_dim);
  }
  static const Pair* across_from(const Pair* across, std::int64_t key, std::int64_t) { return across + key / 2; }

  static void pack_columns(const Shape& shape, Rows<const bfloat16> rows, std::int64_t head, const Lanes& p, float sign,
                           Pair* to) {
    const std::int64_t D = shape.head_dim, all = steps(D);
    const std::int32_t flip = sign < 0 ? static_cast<std::int32_t>(0x80008000u) : 0;
    for (int v = 0; v < round_up(ceil_div(p.count, n), kVectorStep); ++v) {
      const LaneRows<const bfloat16, n> from(shape, rows, head, p, v * n);
      for (std::int64_t step = 0; step < all; step += n) {
        Pairs square[n];
        for (int r = 0; r < n; ++r)
          square[r] = from.row[r] && 2 * step < D ? load_pairs(from.row[r] + 2 * step, D - 2 * step) ^ flip : Pairs{};
        transpose_pairs(square);
        for (int r = 0; r < lesser(n, all - step); ++r) store(to + (step + r) * W + v * n, square[r]);
      }
    }
  }
  static void pack_lanes(const Shape& shape, Rows<const bfloat16> rows, std::int64_t head, const Lanes& p, Pair* to,
                         std::int64_t padded) {
    const auto row_of = [&](std::int64_t lane) -> const bfloat16* {
      return lane < p.count ? lane_row(shape, rows, head, p.first + lane) : nullptr;
    };
    for (std::int64_t i = 0; i < steps(p.count); ++i) {
      const bfloat16 *low = row_of(2 * i), *high = row_of(2 * i + 1);
      for (std::int64_t d = 0; d < padded; d += n)
        store(to + i * padded + d, load_two(low ? low + d : low, high ? high + d : high, shape.head_dim - d));
    }
  }
  static void pack_keys(const bfloat16* from, std::int64_t stride, std::int64_t first, std::int64_t end,
                        std::int64_t head_dim, Pair* to) {
    const std::int64_t all = steps(head_dim);
    for (std::int64_t j = first; j < end; ++j)
      for (std::int64_t step = 0; step < all; step += n)
        store_pairs(to + j * all + step, load_pairs(from + j * stride + 2 * step, greater(0, head_dim - 2 * step)),
                    all - step);
  }
  // `first` is even.
  static void pack_across(const bfloat16* from, std::int64_t stride, std::int64_t first, std::int64_t end,
                          std::int64_t block, std::int64_t head_dim, Pair* to) {
    const std::int64_t to_stride = across_stride(block, head_dim);
    for (std::int64_t j = first; j < end; j += 2 * n)
      for (std::int64_t d = 0; d < head_dim; d += n) {
        Pairs square[n];
        for (int r = 0; r < n; ++r) {
          const std::int64_t low = j + 2 * r;
          square[r] = load_two(low < end ? from + low * stride + d : nullptr,
                               low + 1 < end ? from + (low + 1) * stride + d : nullptr, head_dim - d);
        }
        transpose_pairs(square);
        for (int r = 0; r < lesser(n, head_dim - d); ++r)
          store_pairs(to + (d + r) * to_stride + j / 2, square[r], ceil_div(end - j, 2));
      }
  }

  template <int vectors>
  ESPALIER_SIMD_INLINE static void keep(const WeightPlaces<Pair>& to, std::int64_t j,
                                        const FloatVector (&weight)[2][vectors]) {
    if (to.by_key)
#pragma GCC unroll 8
      for (int v = 0; v < vectors; ++v)
        store(to.by_key + j / 2 * W + v * n, interleave(rounded_pairs(weight[0][v], weight[1][v])));
    if (to.by_lane)
#pragma GCC unroll 2
      for (int k = 0; k < 2; ++k)
#pragma GCC unroll 4
        for (int v = 0; v < vectors; v += 2)
          store(to.by_lane + (j + k) * (W / 2) + v / 2 * n,
                rounded_pairs(weight[k][v], v + 1 < vectors ? weight[k][v + 1] : FloatVector{}));
  }
  static void clear_behind(const WeightPlaces<Pair>& to, std::int64_t count) {
    for (std::int64_t i = ceil_div(count, 2); to.by_key && i < steps(count); ++i)
      __builtin_memset(static_cast<void*>(to.by_key + i * W), 0, sizeof(Pair) * W);
    for (std::int64_t j = count; to.by_lane && j < rows(count); ++j)
      __builtin_memset(static_cast<void*>(to.by_lane + j * (W / 2)), 0, sizeof(Pair) * (W / 2));
  }
};

}  // namespace espalier::ESPALIER_SIMD
