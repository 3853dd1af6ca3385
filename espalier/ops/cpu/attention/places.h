// The pairing of lanes and keys: panels of query rows, blocks of keys, and the keys of a block visible to a panel. Per
// instruction set (see base/simd.h).
//
// The H/J query heads that share a key/value head are folded into rows: lane = query row * (H/J) + head of the group. A
// panel is kPanel consecutive lanes; lanes after the last are zero and belong to the last row. Own key j is visible to
// the rows in [j, subtree_end_j), so the lanes that see any key of a block are contiguous. The cost of a block depends
// only on these vectors of lanes and on its visible keys, not on the rest of the panel.
#pragma once

#include "espalier/ops/cpu/attention/attention.h"
#include "espalier/ops/cpu/attention/tile.h"

namespace espalier::ESPALIER_SIMD {

using attention::Gradients;
using attention::Inputs;
using attention::Rows;
using attention::Shape;

ESPALIER_SIMD_INLINE std::int64_t lesser(std::int64_t a, std::int64_t b) { return a < b ? a : b; }
ESPALIER_SIMD_INLINE std::int64_t greater(std::int64_t a, std::int64_t b) { return a > b ? a : b; }
ESPALIER_SIMD_INLINE std::int64_t ceil_div(std::int64_t a, std::int64_t b) { return (a + b - 1) / b; }
ESPALIER_SIMD_INLINE std::int64_t round_up(std::int64_t a, std::int64_t b) { return ceil_div(a, b) * b; }
template <class A>
ESPALIER_SIMD_INLINE std::int64_t whole_vectors(std::int64_t n) {
  return round_up(n, kLanes<A>);
}

// Scores are formed exactly with +-Q and multiplied by |scale| inside the exponent, so a maximum of S is a maximum of
// scale S.
template <class A>
ESPALIER_SIMD_INLINE A sign(double scale) {
  return scale < 0 ? A(-1) : A(1);
}
template <class A>
ESPALIER_SIMD_INLINE A magnitude(double scale) {
  return static_cast<A>(scale < 0 ? -scale : scale);
}

// Cuts one buffer into pieces that begin at multiples of 256 bytes.
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

// ---- lanes ----

// Lanes [first, first + count) of one key/value head: a panel, or several in a row.
struct Lanes {
  std::int64_t first = 0, count = 0;
  std::int64_t query_min = 0, query_max = 0;
  std::int32_t row_min = 0, row_max = 0;      // their own rows
  std::int32_t depth_min = 0, depth_max = 0;  // depths of these rows; with a window
};
ESPALIER_SIMD_INLINE std::int32_t own_row(const Shape& shape, std::int64_t query) {
  return shape.query_row ? shape.query_row[query] : static_cast<std::int32_t>(query);
}
ESPALIER_SIMD_INLINE Lanes lanes_at(const Shape& shape, std::int64_t first, std::int64_t end) {
  const std::int64_t group = shape.heads / shape.kv_heads;
  Lanes l;
  l.first = first;
  l.count = end - first;
  l.query_min = first / group;
  l.query_max = (end - 1) / group;
  l.row_min = own_row(shape, l.query_min);
  l.row_max = own_row(shape, l.query_max);
  if (shape.window == 0) return l;
  l.depth_min = l.depth_max = shape.depth[l.row_min];
  for (std::int64_t query = l.query_min + 1; query <= l.query_max; ++query) {
    const std::int32_t depth = shape.depth[own_row(shape, query)];
    l.depth_min = depth < l.depth_min ? depth : l.depth_min;
    l.depth_max = depth > l.depth_max ? depth : l.depth_max;
  }
  return l;
}
// Panel `index` of the lanes [begin, end).
template <class A>
ESPALIER_SIMD_INLINE Lanes panel_at(const Shape& shape, std::int64_t begin, std::int64_t end, std::int64_t index) {
  const std::int64_t first = begin + index * kPanel<A>;
  return lanes_at(shape, first, lesser(first + kPanel<A>, end));
}
// The own row of each lane and, with a window, its depth; a panel has kTileVectors vectors of them.
template <class A>
struct LanePlaces {
  using Number = decltype(IntegerVector<A>{}[0] + 0);
  IntegerVector<A>*row = nullptr, *depth = nullptr;

  static LanePlaces take(Carver& carver, const Shape& shape, std::int64_t panels) {
    const auto row = carver.take<IntegerVector<A>>(panels * kTileVectors);
    return {row, shape.window > 0 ? carver.take<IntegerVector<A>>(panels * kTileVectors) : nullptr};
  }
  LanePlaces from(std::int64_t vector) const { return {row + vector, depth ? depth + vector : depth}; }
  void fill(const Shape& shape, const Lanes& p) const {
    const std::int64_t group = shape.heads / shape.kv_heads;
    for (int lane = 0; lane < kPanel<A>; ++lane) {
      const std::int32_t at = lane < p.count ? own_row(shape, (p.first + lane) / group) : p.row_max;
      reinterpret_cast<Number*>(row)[lane] = at;
      if (depth) reinterpret_cast<Number*>(depth)[lane] = shape.depth[at];
    }
  }
};
// Address of a lane's row in an operand with H heads.
template <class T>
ESPALIER_SIMD_INLINE T* lane_row(const Shape& shape, Rows<T> rows, std::int64_t head, std::int64_t lane) {
  const std::int64_t group = shape.heads / shape.kv_heads;
  return rows.data + lane / group * rows.stride + (head * group + lane % group) * shape.head_dim;
}

// The rows of n lanes of a panel, from lane `from` on; null after the panel's last lane.
template <class T, int n>
struct LaneRows {
  T* row[n];
  LaneRows(const Shape& shape, Rows<T> rows, std::int64_t head, const Lanes& p, std::int64_t from) {
    for (int r = 0; r < n; ++r) row[r] = from + r < p.count ? lane_row(shape, rows, head, p.first + from + r) : nullptr;
  }
};

// ---- keys ----

// One block of keys of the path (ends == null) or of the own rows.
struct KeyBlock {
  std::int64_t begin = 0, count = 0;
  const std::int32_t* ends = nullptr;  // subtree_end of its keys
  std::int32_t end_min = 0, end_max = 0;
  const std::int32_t* depths = nullptr;       // of own keys, with a window
  std::int32_t depth_min = 0, depth_max = 0;  // depths of all keys, with a window

  ESPALIER_SIMD_INLINE std::int32_t depth(std::int64_t j) const {
    return ends ? depths[j] : static_cast<std::int32_t>(begin + j);
  }
};

// All keys in blocks of `size`, the path's first; the ranges of subtree_end and depth of each own block are found once.
class KeyBlocks {
 public:
  KeyBlocks(Carver& carver, const Shape& shape, std::int64_t size)
      : shape_(shape), size_(size), path_(ceil_div(shape.path_rows, size)), own_(ceil_div(shape.own_rows, size)) {
    range_ = carver.take<std::int32_t>((shape.window > 0 ? 4 : 2) * own_);
  }
  std::int64_t count() const { return path_ + own_; }
  std::int64_t own_count() const { return own_; }
  void find_range(std::int64_t own) const {
    find(shape_.subtree_end, own, range_ + 2 * own);
    if (shape_.window > 0) find(shape_.depth, own, range_ + 2 * (own_ + own));
  }
  KeyBlock at(std::int64_t index) const {
    KeyBlock block;
    if (index < path_) {
      block.begin = index * size_;
      block.count = lesser(size_, shape_.path_rows - block.begin);
      block.depth_min = block.depth(0), block.depth_max = block.depth(block.count - 1);
      return block;
    }
    const std::int64_t own = index - path_;
    block.begin = own * size_;
    block.count = lesser(size_, shape_.own_rows - block.begin);
    block.ends = shape_.subtree_end + block.begin;
    block.end_min = range_[2 * own], block.end_max = range_[2 * own + 1];
    if (shape_.window == 0) return block;
    block.depths = shape_.depth + block.begin;
    block.depth_min = range_[2 * (own_ + own)], block.depth_max = range_[2 * (own_ + own) + 1];
    return block;
  }

 private:
  // The least and the largest of `values` at the rows of own block `own`.
  void find(const std::int32_t* values, std::int64_t own, std::int32_t* range) const {
    const std::int32_t* of_block = values + own * size_;
    std::int32_t low = of_block[0], high = of_block[0];
    for (std::int64_t j = 1; j < lesser(size_, shape_.own_rows - own * size_); ++j) {
      low = of_block[j] < low ? of_block[j] : low;
      high = of_block[j] > high ? of_block[j] : high;
    }
    range[0] = low;
    range[1] = high;
  }

  const Shape& shape_;
  std::int64_t size_, path_, own_;
  std::int32_t* range_;
};

// The visible keys of a block: [first, end), seen by some lane of the vectors [vector, vector + vectors) and by no
// other lane. `masked`: not all of these lanes see all of these keys. end 0: no key is visible.
struct Visible {
  std::int64_t first = 0, end = 0;
  int vector = 0, vectors = 0;
  bool masked = false;
  std::int64_t keys() const { return end - first; }
};

// The first query in [from, to) whose own row is at least `row`; `to` if there is none.
ESPALIER_SIMD_INLINE std::int64_t first_query_at(const Shape& shape, std::int64_t from, std::int64_t to,
                                                 std::int32_t row) {
  if (!shape.query_row) return greater(from, lesser(to, row));
  while (from < to) {
    const std::int64_t middle = (from + to) / 2;
    if (shape.query_row[middle] < row)
      from = middle + 1;
    else
      to = middle;
  }
  return from;
}

// `first` is a multiple of key_step, `vector` and (within the panel) `vectors` are multiples of vector_step.
template <class A>
ESPALIER_SIMD_INLINE Visible visible(const Shape& shape, const KeyBlock& block, const Lanes& p, int key_step,
                                     int vector_step) {
  Visible v;
  v.end = block.count;
  v.vectors = static_cast<int>(round_up(ceil_div(p.count, kLanes<A>), vector_step));
  // With a window, keys at depths up to `none` are seen by no lane, and keys deeper than `some` by every lane.
  const bool windowed = shape.window > 0;
  const std::int64_t none = windowed ? p.depth_min - shape.window : 0, some = windowed ? p.depth_max - shape.window : 0;
  if (windowed && block.depth_max <= none) return Visible{};
  const bool whole = !windowed || block.depth_min > some;
  if (!block.ends) {
    if (whole) return v;
    v.first = greater(0, none + 1 - block.begin);
    v.first -= v.first % key_step;
    v.masked = block.begin + v.first <= some;
    return v;
  }
  if (block.begin > p.row_max || block.end_max <= p.row_min) return Visible{};
  std::int32_t row_min = p.row_min, row_max = p.row_max;
  if (block.begin > row_min || block.end_max <= row_max) {  // some rows are before the block or after its subtrees
    const std::int64_t behind = p.query_max + 1, group = shape.heads / shape.kv_heads;
    const std::int64_t from = first_query_at(shape, p.query_min, behind, static_cast<std::int32_t>(block.begin));
    const std::int64_t to = first_query_at(shape, from, behind, block.end_max);
    if (from == to) return Visible{};
    row_min = own_row(shape, from);
    row_max = own_row(shape, to - 1);
    const std::int64_t step = kLanes<A> * vector_step;
    const std::int64_t low = greater(0, from * group - p.first), high = lesser(p.count, to * group - p.first);
    v.vector = static_cast<int>(low / step) * vector_step;
    v.vectors = static_cast<int>(ceil_div(high, step)) * vector_step - v.vector;
    v.masked = low > v.vector * kLanes<A> || (high < p.count && high < (v.vector + v.vectors) * kLanes<A>);
  }
  v.end = lesser(block.count, row_max + 1 - block.begin);
  if (!v.masked && whole && block.begin + v.end - 1 <= row_min && block.end_min > row_max) return v;
  const auto hidden = [&](std::int64_t j) { return block.ends[j] <= row_min || (!whole && block.depths[j] <= none); };
  while (v.first < v.end && hidden(v.first)) ++v.first;
  while (v.first < v.end && hidden(v.end - 1)) --v.end;
  if (v.first >= v.end) return Visible{};
  v.masked |= block.begin + v.end - 1 > row_min;
  v.first -= v.first % key_step;
  for (std::int64_t j = v.first; j < v.end; ++j)
    v.masked |= block.ends[j] <= row_max || (!whole && block.depths[j] <= some);
  return v;
}
// Lanes of vector v that see key j of the block: own rows in [j, subtree_end_j), depths less than the window below j's.
template <class A>
ESPALIER_SIMD_INLINE IntegerVector<A> sees(const Shape& shape, const KeyBlock& block, std::int64_t j,
                                           const LanePlaces<A>& lanes, int v) {
  using N = typename LanePlaces<A>::Number;
  IntegerVector<A> seen = IntegerVector<A>{} == 0;
  if (block.ends)
    seen = (lanes.row[v] >= static_cast<N>(block.begin + j)) & (lanes.row[v] < static_cast<N>(block.ends[j]));
  if (shape.window > 0) seen &= lanes.depth[v] - static_cast<N>(block.depth(j)) < static_cast<N>(shape.window);
  return seen;
}

}  // namespace espalier::ESPALIER_SIMD
