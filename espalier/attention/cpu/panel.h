// Moving rows into panels and back, and which keys a panel sees. Per instruction set (see base/simd.h).
//
// The H/J query heads that share a key/value head are folded into rows: lane = query row * (H/J) + head of the group.
// Lanes of one panel are kPanel consecutive ones; lanes behind the last are zero and stand at the last row.
#pragma once

#include "espalier/attention/attention.h"
#include "espalier/attention/cpu/tile.h"

namespace espalier::ESPALIER_SIMD {

using attention::Gradients;
using attention::Inputs;
using attention::Rows;
using attention::Shape;

ESPALIER_SIMD_INLINE std::int64_t lesser(std::int64_t a, std::int64_t b) { return a < b ? a : b; }
ESPALIER_SIMD_INLINE std::int64_t greater(std::int64_t a, std::int64_t b) { return a > b ? a : b; }
ESPALIER_SIMD_INLINE std::int64_t ceil_div(std::int64_t a, std::int64_t b) { return (a + b - 1) / b; }
template <class A>
ESPALIER_SIMD_INLINE std::int64_t whole_vectors(std::int64_t n) {
  return ceil_div(n, kLanes<A>) * kLanes<A>;
}

// Scores are formed with +-Q, exactly, and multiplied by |scale| inside the exponent: a maximum of S stays one of
// scale S.
template <class A>
ESPALIER_SIMD_INLINE A sign(double scale) {
  return scale < 0 ? A(-1) : A(1);
}
template <class A>
ESPALIER_SIMD_INLINE A magnitude(double scale) {
  return static_cast<A>(scale < 0 ? -scale : scale);
}

// Keys that meet a panel at once: their block of scores and of values stays in the cache next to the core.
template <class A>
ESPALIER_SIMD_INLINE std::int64_t key_block(std::int64_t head_dim) {
  const std::int64_t keys = 65536 / static_cast<std::int64_t>(sizeof(A)) / head_dim;
  return keys >= 120 ? 120 : keys <= 48 ? 48 : keys / 12 * 12;
}

// Hands out pieces of one buffer, each aligned to a cache line.
class Carver {
 public:
  explicit Carver(void* base) : at_(static_cast<char*>(base)) {}
  template <class A>
  ESPALIER_SIMD_INLINE A* take(std::int64_t count) {
    A* piece = reinterpret_cast<A*>(at_ + used_);
    used_ += (static_cast<std::size_t>(count) * sizeof(A) + 255) / 256 * 256;
    return piece;
  }
  ESPALIER_SIMD_INLINE std::size_t used() const { return used_; }

 private:
  char* at_;
  std::size_t used_ = 0;
};

// Rows of one panel: lanes [first, first + count) of key/value head `head`.
template <class A>
struct PanelPlace {
  std::int64_t first = 0;
  int count = 0;
  int vectors = 0;
  std::int32_t row_min = 0, row_max = 0;  // own rows at which its lanes stand
};
ESPALIER_SIMD_INLINE std::int32_t own_row(const Shape& shape, std::int64_t query) {
  return shape.query_row ? shape.query_row[query] : static_cast<std::int32_t>(query);
}
template <class A>
ESPALIER_SIMD_INLINE PanelPlace<A> panel_at(const Shape& shape, std::int64_t first, std::int64_t end) {
  const std::int64_t group = shape.heads / shape.kv_heads;
  PanelPlace<A> p;
  p.first = first;
  p.count = static_cast<int>(lesser(end - first, kPanel<A>));
  p.vectors = static_cast<int>(ceil_div(p.count, kLanes<A>));
  p.row_min = own_row(shape, first / group);
  p.row_max = own_row(shape, (first + p.count - 1) / group);
  return p;
}
template <class A, class I>
ESPALIER_SIMD_INLINE void lane_rows(const Shape& shape, const PanelPlace<A>& p, I* rows) {
  const std::int64_t group = shape.heads / shape.kv_heads;
  for (int lane = 0; lane < kPanel<A>; ++lane)
    rows[lane] = lane < p.count ? own_row(shape, (p.first + lane) / group) : p.row_max;
}

// One block of keys of the path (ends == null) or of the own rows.
struct KeyBlock {
  std::int64_t begin = 0, count = 0;
  const std::int32_t* ends = nullptr;  // subtree_end of its keys
  std::int32_t end_min = 0, end_max = 0;
};
ESPALIER_SIMD_INLINE KeyBlock block_at(const Shape& shape, std::int64_t index, std::int64_t size) {
  const std::int64_t path_blocks = ceil_div(shape.path_rows, size);
  KeyBlock b;
  if (index < path_blocks) {
    b.begin = index * size;
    b.count = lesser(size, shape.path_rows - b.begin);
    return b;
  }
  b.begin = (index - path_blocks) * size;
  b.count = lesser(size, shape.own_rows - b.begin);
  b.ends = shape.subtree_end + b.begin;
  b.end_min = b.end_max = b.ends[0];
  for (std::int64_t j = 1; j < b.count; ++j) {
    b.end_min = b.ends[j] < b.end_min ? b.ends[j] : b.end_min;
    b.end_max = b.ends[j] > b.end_max ? b.ends[j] : b.end_max;
  }
  return b;
}
ESPALIER_SIMD_INLINE std::int64_t block_count(const Shape& shape, std::int64_t size) {
  return ceil_div(shape.path_rows, size) + ceil_div(shape.own_rows, size);
}

// The keys [first, end) of a block that some row in [row_min, row_max] may see; masked where not all rows see all.
struct Visible {
  std::int64_t first = 0, end = 0;
  bool masked = false;
};
ESPALIER_SIMD_INLINE Visible visible(const KeyBlock& block, std::int32_t row_min, std::int32_t row_max) {
  Visible v;
  v.end = block.count;
  if (!block.ends) return v;
  v.end = lesser(block.count, row_max + 1 - block.begin);
  if (v.end <= 0 || block.end_max <= row_min) return Visible{};
  if (block.begin + v.end - 1 <= row_min && block.end_min > row_max) return v;
  while (v.first < v.end && block.ends[v.first] <= row_min) ++v.first;
  while (v.first < v.end && block.ends[v.end - 1] <= row_min) --v.end;
  v.masked = block.begin + v.end - 1 > row_min;
  for (std::int64_t j = v.first; j < v.end; ++j) v.masked |= block.ends[j] <= row_max;
  return v;
}
// Lanes that see own key j: j <= row < end.
template <class I>
ESPALIER_SIMD_INLINE I sees(I rows, std::int64_t key, std::int32_t end) {
  using S = decltype(rows[0] + rows[0]);
  return (rows >= static_cast<S>(key)) & (rows < static_cast<S>(end));
}

// Rows [0, count) of one head as numbers of the accumulator type, `stride` apart; columns behind D become 0.
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

// Transposes a square of kLanes x kLanes by rounds of interleaving row i with row i + kLanes / 2.
template <class A>
ESPALIER_SIMD_INLINE void transpose(Vector<A> (&x)[kLanes<A>]) {
  constexpr int n = kLanes<A>;
  IntegerVector<A> low{}, high{};
  for (int i = 0; i < n; ++i) {
    low[i] = i / 2 + (i % 2) * n;
    high[i] = n / 2 + i / 2 + (i % 2) * n;
  }
#pragma GCC unroll 5
  for (int round = 1; round < n; round *= 2) {
    Vector<A> y[n];
#pragma GCC unroll 16
    for (int i = 0; i < n / 2; ++i) {
      y[2 * i] = __builtin_shuffle(x[i], x[i + n / 2], low);
      y[2 * i + 1] = __builtin_shuffle(x[i], x[i + n / 2], high);
    }
#pragma GCC unroll 16
    for (int i = 0; i < n; ++i) x[i] = y[i];
  }
}

// Address of a lane's row in an operand with H heads.
template <class T>
ESPALIER_SIMD_INLINE T* lane_row(const Shape& shape, Rows<T> rows, std::int64_t head, std::int64_t lane) {
  const std::int64_t group = shape.heads / shape.kv_heads;
  return rows.data + lane / group * rows.stride + (head * group + lane % group) * shape.head_dim;
}

// to[d][lane] = factor * row of lane, element d.
template <class T>
void pack_panel(const Shape& shape, Rows<const T> rows, std::int64_t head, const PanelPlace<accumulator_t<T>>& p,
                accumulator_t<T> factor, accumulator_t<T>* to) {
  using A = accumulator_t<T>;
  constexpr int n = kLanes<A>;
  for (int v = 0; v < p.vectors; ++v)
    for_lanes<A>(shape.head_dim, [&](std::int64_t d, int count) {
      Vector<A> square[n];
      for (int r = 0; r < n; ++r) {
        const int lane = v * n + r;
        square[r] =
            lane < p.count ? load_some(lane_row(shape, rows, head, p.first + lane) + d, count) * factor : Vector<A>{};
      }
      transpose<A>(square);
      for (int r = 0; r < count; ++r) store(to + (d + r) * kPanel<A> + v * n, square[r]);
    });
}

// row of lane, element d = from[d][lane] * factor[lane]: overwrites.
template <class T>
void unpack_panel(const Shape& shape, const accumulator_t<T>* from, const accumulator_t<T>* factor, std::int64_t head,
                  const PanelPlace<accumulator_t<T>>& p, Rows<T> rows) {
  using A = accumulator_t<T>;
  constexpr int n = kLanes<A>;
  for (int v = 0; v < p.vectors; ++v) {
    const Vector<A> by = load(factor + v * n);
    for_lanes<A>(shape.head_dim, [&](std::int64_t d, int count) {
      Vector<A> square[n];
      for (int r = 0; r < n; ++r) square[r] = r < count ? load(from + (d + r) * kPanel<A> + v * n) * by : Vector<A>{};
      transpose<A>(square);
      for (int r = 0; r < n && v * n + r < p.count; ++r)
        store_some(lane_row(shape, rows, head, p.first + v * n + r) + d, square[r], count);
    });
  }
}

}  // namespace espalier::ESPALIER_SIMD
