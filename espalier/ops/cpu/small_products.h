// Products of small matrices in the caches, for files of espalier_simd_sources.
#pragma once

#include "espalier/base/simd.h"

namespace espalier::ESPALIER_SIMD {

// A left factor [rows, steps], element (i, k) at i * row + k * step.
template <class A>
struct LeftFactor {
  const A* at;
  std::int64_t row, step;
};
// The elements of a left factor that count: all; step <= row; step >= row. Other elements in the same tile must be 0.
enum class Triangle : std::uint8_t { none, lower, upper };

namespace detail {

inline constexpr int kTileRows = 4, kTileVectors = kVectorRegisters == 32 ? 4 : 2;

template <class A, int rows, int vectors>
ESPALIER_SIMD_INLINE void product_tile(const LeftFactor<A>& left, std::int64_t begin, std::int64_t end, const A* right,
                                       std::int64_t stride, int count, A keep, A factor, A* out, std::int64_t width) {
  Vector<A> sum[rows][vectors] = {};
  for (std::int64_t k = begin; k < end; ++k) {
    Vector<A> b[vectors];
#pragma GCC unroll 4
    for (int v = 0; v < vectors; ++v) b[v] = load_some(right + k * stride + v * kLanes<A>, count);
#pragma GCC unroll 4
    for (int r = 0; r < rows; ++r) {
      const Vector<A> a = broadcast(left.at[r * left.row + k * left.step]);
#pragma GCC unroll 4
      for (int v = 0; v < vectors; ++v) sum[r][v] = fma(a, b[v], sum[r][v]);
    }
  }
  for (int r = 0; r < rows; ++r)
    for (int v = 0; v < vectors; ++v) {
      A* const to = out + r * width + v * kLanes<A>;
      const Vector<A> added = sum[r][v] * factor;
      store_some(to, keep == 0 ? added : fma(load_some(to, count), keep, added), count);
    }
}

// One column of tiles: all rows, `vectors` vectors wide.
template <class A, int vectors>
void product_column(std::int64_t rows, std::int64_t steps, LeftFactor<A> left, Triangle triangle, const A* right,
                    std::int64_t stride, int count, std::int64_t first_row, A keep, A factor, A* out,
                    std::int64_t width) {
  for (std::int64_t i = first_row; i < rows; i += kTileRows) {
    const std::int64_t here = rows - i < kTileRows ? rows - i : kTileRows;
    const std::int64_t begin = triangle == Triangle::upper ? i : 0;
    const std::int64_t end = triangle == Triangle::lower && i + here < steps ? i + here : steps;
    const LeftFactor<A> from{left.at + i * left.row, left.row, left.step};
    A* const to = out + i * width;
    if (here == 4)
      product_tile<A, 4, vectors>(from, begin, end, right, stride, count, keep, factor, to, width);
    else if (here == 3)
      product_tile<A, 3, vectors>(from, begin, end, right, stride, count, keep, factor, to, width);
    else if (here == 2)
      product_tile<A, 2, vectors>(from, begin, end, right, stride, count, keep, factor, to, width);
    else
      product_tile<A, 1, vectors>(from, begin, end, right, stride, count, keep, factor, to, width);
  }
}

}  // namespace detail

// out = keep out + factor left right, with right [steps, columns] and out [rows, columns] at strides; out is not
// read if keep is 0. `triangle`: of the left factor. `lower_out`: only out's tiles at and below the diagonal are
// written.
template <class A>
void small_product(std::int64_t rows, std::int64_t columns, std::int64_t steps, const LeftFactor<A>& left,
                   Triangle triangle, const A* right, std::int64_t stride, A keep, A factor, A* out, std::int64_t width,
                   bool lower_out = false) {
  constexpr std::int64_t kWide = detail::kTileVectors * kLanes<A>;
  const auto first_row = [&](std::int64_t column) {
    return lower_out ? column / detail::kTileRows * detail::kTileRows : 0;
  };
  std::int64_t j = 0;
  for (; j + kWide <= columns; j += kWide)
    detail::product_column<A, detail::kTileVectors>(rows, steps, left, triangle, right + j, stride, kLanes<A>,
                                                    first_row(j), keep, factor, out + j, width);
  for (; j < columns; j += kLanes<A>) {
    const int count = columns - j < kLanes<A> ? static_cast<int>(columns - j) : kLanes<A>;
    detail::product_column<A, 1>(rows, steps, left, triangle, right + j, stride, count, first_row(j), keep, factor,
                                 out + j, width);
  }
}

// to [columns, rows] = the transpose of from [rows, columns], at strides.
template <class A>
void transpose(std::int64_t rows, std::int64_t columns, const A* from, std::int64_t stride, A* to, std::int64_t width) {
  constexpr std::int64_t kBlock = 16;
  for (std::int64_t i0 = 0; i0 < rows; i0 += kBlock)
    for (std::int64_t j0 = 0; j0 < columns; j0 += kBlock) {
      const std::int64_t i1 = i0 + kBlock < rows ? i0 + kBlock : rows,
                         j1 = j0 + kBlock < columns ? j0 + kBlock : columns;
      for (std::int64_t j = j0; j < j1; ++j)
        for (std::int64_t i = i0; i < i1; ++i) to[j * width + i] = from[i * stride + j];
    }
}

}  // namespace espalier::ESPALIER_SIMD
