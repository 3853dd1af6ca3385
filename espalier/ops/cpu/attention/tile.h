// Register-blocked products on panels: the inner loops of attention. Per instruction set (see base/simd.h).
//
// A panel is kPanel rows of queries side by side in vector lanes. Scores, maxima, masks and sums of many rows are then
// plain vector arithmetic, and keys and values are read, one factor at a time, in their natural layout:
//   scores    S[n][W]  = X[n][k] . Y[k][W]              (K Q^T, V dO^T)
//   weighted  C[D][W]  = C o alpha + X[k][D]^T . S[k][W]  (V^T P^T, K^T dS^T)
//   outer     C[n][D] += S[n][k] . R[k][D]              (P^T dO, dS^T Q)
// W = kPanel, of which the first `vectors` vectors are computed. Factors E are numbers of the sums' type A, or pairs of
// bfloat16 (pairs.h), where k counts pairs. A tile of up to kTileRows x kTileVectors sums stays in registers: per step
// kTileVectors loads and kTileRows broadcasts feed kTileRows * kTileVectors fused products.
#pragma once

#include "espalier/base/simd.h"
#include "espalier/ops/cpu/attention/pairs.h"

namespace espalier::ESPALIER_SIMD {

inline constexpr int kTileRows = 6, kTileVectors = kVectorRegisters == 32 ? 4 : 2;  // 24 of 32 registers or 12 of 16
template <class A>
inline constexpr int kPanel = kTileVectors* kLanes<A>;

template <int n>
struct Int {
  static constexpr int value = n;
};

// body(Int<rows>, first row): tiles of kTileRows rows, then of 4, 2 and 1.
template <class Body>
ESPALIER_SIMD_INLINE void for_tiles(std::int64_t n, Body&& body) {
  std::int64_t r = 0;
  for (; r + kTileRows <= n; r += kTileRows) body(Int<kTileRows>{}, r);
  if (n - r >= 4) body(Int<4>{}, r), r += 4;
  if (n - r >= 2) body(Int<2>{}, r), r += 2;
  if (n - r >= 1) body(Int<1>{}, r);
}

// body(Int<vectors>) for a number known at run time, 1 to kTileVectors.
template <class Body>
ESPALIER_SIMD_INLINE void with_vectors(int vectors, Body&& body) {
  if (vectors == kTileVectors) return body(Int<kTileVectors>{});
  if constexpr (kTileVectors > 3) {
    if (vectors == 3) return body(Int<3>{});
  }
  if constexpr (kTileVectors > 2) {
    if (vectors == 2) return body(Int<2>{});
  }
  body(Int<1>{});
}

// The place of the left factor of (row, step): left[row * stride + step] or left[step * stride + row].
enum class Left { steps_adjacent, rows_adjacent };

template <Left layout, int rows, int vectors, class E, class V>
ESPALIER_SIMD_INLINE void multiply(std::int64_t steps, const E* left, std::int64_t stride, const E* right,
                                   std::int64_t right_stride, V (&sums)[rows][vectors]) {
  constexpr int lanes = ESPALIER_SIMD_BYTES / static_cast<int>(sizeof(E));
#pragma GCC unroll 2
  for (std::int64_t k = 0; k < steps; ++k) {
    decltype(load(right)) b[vectors];
#pragma GCC unroll 8
    for (int v = 0; v < vectors; ++v) b[v] = load(right + v * lanes);
    right += right_stride;
#pragma GCC unroll 8
    for (int r = 0; r < rows; ++r) {
      const auto a = broadcast(layout == Left::steps_adjacent ? left[r * stride + k] : left[r]);
#pragma GCC unroll 8
      for (int v = 0; v < vectors; ++v) sums[r][v] = fma(a, b[v], sums[r][v]);
    }
    if (layout == Left::rows_adjacent) left += stride;
  }
}

// S = X Y, and top[v] = max(top[v], columns of S).
template <int vectors, bool with_top, class E, class A>
__attribute__((noinline)) void scores(std::int64_t n, std::int64_t steps, const E* x, const E* y, A* s, A* top) {
  constexpr int W = kPanel<A>;
  for_tiles(n, [&](auto tile, std::int64_t first) {
    constexpr int rows = decltype(tile)::value;
    Vector<A> sums[rows][vectors] = {};
    multiply<Left::steps_adjacent>(steps, x + first * steps, steps, y, W, sums);
#pragma GCC unroll 8
    for (int v = 0; v < vectors; ++v) {
#pragma GCC unroll 8
      for (int r = 0; r < rows; ++r) store(s + (first + r) * W + v * kLanes<A>, sums[r][v]);
      if constexpr (with_top) {
        Vector<A> best = load(top + v * kLanes<A>);
#pragma GCC unroll 8
        for (int r = 0; r < rows; ++r) best = max(sums[r][v], best);
        store(top + v * kLanes<A>, best);
      }
    }
  });
}

// C = C o alpha + X^T S; without alpha: C += X^T S. `layout`: of X; the rows of X^T are the rows of C.
template <int vectors, bool with_alpha, Left layout, class E, class A>
__attribute__((noinline)) void weighted(std::int64_t steps, std::int64_t rows_of_c, const E* x, std::int64_t stride,
                                        const E* s, A* c, const A* alpha) {
  constexpr int W = kPanel<A>;
  for_tiles(rows_of_c, [&](auto tile, std::int64_t first) {
    constexpr int rows = decltype(tile)::value;
    Vector<A> sums[rows][vectors];
#pragma GCC unroll 8
    for (int v = 0; v < vectors; ++v)
#pragma GCC unroll 8
      for (int r = 0; r < rows; ++r) {
        sums[r][v] = load(c + (first + r) * W + v * kLanes<A>);
        if constexpr (with_alpha) sums[r][v] *= load(alpha + v * kLanes<A>);
      }
    multiply<layout>(steps, layout == Left::rows_adjacent ? x + first : x + first * stride, stride, s, W, sums);
#pragma GCC unroll 8
    for (int r = 0; r < rows; ++r)
#pragma GCC unroll 8
      for (int v = 0; v < vectors; ++v) store(c + (first + r) * W + v * kLanes<A>, sums[r][v]);
  });
}

template <int vectors, class E, class A>
__attribute__((noinline)) void outer_columns(std::int64_t n, std::int64_t steps, const E* s, std::int64_t s_stride,
                                             const E* r_panel, A* c, std::int64_t stride) {
  for_tiles(n, [&](auto tile, std::int64_t first) {
    constexpr int rows = decltype(tile)::value;
    Vector<A> sums[rows][vectors];
#pragma GCC unroll 8
    for (int r = 0; r < rows; ++r)
#pragma GCC unroll 8
      for (int v = 0; v < vectors; ++v) sums[r][v] = load(c + (first + r) * stride + v * kLanes<A>);
    multiply<Left::steps_adjacent>(steps, s + first * s_stride, s_stride, r_panel, stride, sums);
#pragma GCC unroll 8
    for (int r = 0; r < rows; ++r)
#pragma GCC unroll 8
      for (int v = 0; v < vectors; ++v) store(c + (first + r) * stride + v * kLanes<A>, sums[r][v]);
  });
}

// C += S R over all columns; stride of C and R: the head size rounded up to whole vectors.
template <class E, class A>
void outer(std::int64_t n, std::int64_t steps, const E* s, std::int64_t s_stride, const E* r_panel, A* c,
           std::int64_t stride) {
  const int all = static_cast<int>(stride / kLanes<A>), groups = (all + kTileVectors - 1) / kTileVectors;
  for (int g = 0, from = 0; g < groups; ++g) {
    const int vectors = (all - from + groups - g - 1) / (groups - g);  // as even as possible: 6 = 3 + 3
    with_vectors(vectors, [&](auto count) {
      outer_columns<decltype(count)::value>(n, steps, s, s_stride, r_panel + from * kLanes<A>, c + from * kLanes<A>,
                                            stride);
    });
    from += vectors;
  }
}

// The products above as one type, a member of the operands (operands.h).
struct VectorProducts {
  // Factors per step of a sum, rows and vectors of sums computed together.
  static constexpr int kSteps = 1, kRows = 1, kVectors = 1;
  static constexpr int kKeys = 120;  // most keys of a block: whole tiles
  struct Session {};                 // a thread's state while it multiplies

  template <int vectors, bool with_top, class E, class A>
  static void scores(std::int64_t n, std::int64_t steps, const E* x, const E* y, A* s, A* top) {
    ESPALIER_SIMD::scores<vectors, with_top>(n, steps, x, y, s, top);
  }
  template <int vectors, bool with_alpha, Left layout, class E, class A>
  static void weighted(std::int64_t steps, std::int64_t rows_of_c, const E* x, std::int64_t stride, const E* s, A* c,
                       const A* alpha) {
    ESPALIER_SIMD::weighted<vectors, with_alpha, layout>(steps, rows_of_c, x, stride, s, c, alpha);
  }
  template <class E, class A>
  static void outer(std::int64_t n, std::int64_t steps, const E* s, std::int64_t s_stride, const E* r_panel, A* c,
                    std::int64_t stride) {
    ESPALIER_SIMD::outer(n, steps, s, s_stride, r_panel, c, stride);
  }
};

}  // namespace espalier::ESPALIER_SIMD
