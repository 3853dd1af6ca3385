// The tiles of keys that a tile of queries meets, for attention kernels that go over tiles: the path's tiles first,
// then the tiles of own rows. Facts of whole tiles say which of them nobody sees, and which all rows see whole, so that
// no element needs a mask.
#pragma once

#include "espalier/ops/cuda/visible.h"

namespace espalier::cuda {

// Numbers of tiles of rows. Depths: null without a window.
struct TileFacts {
  const std::int32_t *most_end, *least_end;      // of a tile of own keys, ends of their subtrees; least: 0 in a part
  const std::int32_t *most_depth, *least_depth;  // of a tile of own keys
  const std::int32_t *least_first, *most_first;  // of a tile of queries, the first depth that each one sees
};

// Sizes: keys of a tile and of its facts, queries of a block and of their facts. kRules: there may be a window or a
// cap.
template <int keys, int fact_keys, int queries, int fact_queries, bool rules>
struct Tiling {
  static constexpr int kKeys = keys, kFactKeys = fact_keys, kQueries = queries, kFactQueries = fact_queries;
  static constexpr bool kRules = rules;
};

template <class T>
struct KeyTiles {
  int of_path, all, begin = 0;  // tiles of the path, all tiles, the first one that a row sees
  int path_rows, first_row, last_row;
  std::int32_t least_first = 0, most_first = 0;  // of the first depths that the rows see
  TileFacts facts;

  __device__ __forceinline__ KeyTiles(const Shape& shape, int first_query, const TileFacts& of_tiles)
      : path_rows(static_cast<int>(shape.path_rows)),
        first_row(static_cast<int>(own_row_of(shape, first_query))),
        facts(of_tiles) {
    const int end = min(first_query + T::kQueries, static_cast<int>(shape.query_rows));
    last_row = static_cast<int>(own_row_of(shape, end - 1));
    of_path = (path_rows + T::kKeys - 1) / T::kKeys;
    all = of_path + last_row / T::kKeys + 1;
    if (!T::kRules || facts.least_first == nullptr) return;
    int tile = first_query / T::kFactQueries;
    least_first = facts.least_first[tile], most_first = facts.most_first[tile];
    for (int query = first_query + T::kFactQueries; query < end; query += T::kFactQueries) {
      ++tile;
      least_first = min(least_first, facts.least_first[tile]);
      most_first = max(most_first, facts.most_first[tile]);
    }
    if (least_first >= path_rows)
      begin = of_path;
    else if (least_first > 0)
      begin = least_first / T::kKeys;
  }
  __device__ __forceinline__ bool is_path(int n) const { return n < of_path; }
  // The first key of a tile in its region.
  __device__ __forceinline__ int first(int n) const { return (is_path(n) ? n : n - of_path) * T::kKeys; }
  __device__ __forceinline__ bool seen(int n) const {
    if (is_path(n)) return true;
    const int tile = first(n) / T::kFactKeys;
    if (T::kRules && facts.most_depth != nullptr && facts.most_depth[tile] < least_first) return false;
    return facts.most_end[tile] > first_row;
  }
  // The first tile from n on that a row sees.
  __device__ __forceinline__ int from(int n) const {
    while (n < all && !seen(n)) ++n;
    return n;
  }
  // True if all rows see all keys of a tile.
  __device__ __forceinline__ bool whole(int n) const {
    const int key = first(n), last = key + T::kKeys - 1;
    if (is_path(n)) return last < path_rows && (!T::kRules || key >= most_first);
    const int tile = key / T::kFactKeys;
    if (last > first_row || facts.least_end[tile] <= last_row) return false;
    return !T::kRules || facts.least_depth == nullptr || facts.least_depth[tile] >= most_first;
  }
};

// True if the query at own row `row` sees key number `key` of a region; `end` is the key's subtree's.
__device__ __forceinline__ bool sees(bool path, int key, int path_rows, int row, int end) {
  return path ? key < path_rows : key <= row && row < end;
}

// The first depths that the two query rows of a lane see, where there are windows.
template <bool kRules>
struct FirstDepths {
  std::int32_t of[2];

  __device__ __forceinline__ void set(const Shape& shape, int r, int row) {
    if constexpr (kRules) of[r] = first_depth_of(shape, row);
  }
  __device__ __forceinline__ bool reach(int r, std::int32_t depth) const { return !kRules || depth >= of[r]; }
};
// The depth of a key that is inside its region.
template <bool kRules>
__device__ __forceinline__ std::int32_t key_depth(const Shape& shape, bool path, bool inside, int key) {
  if (!kRules || path) return key;
  return inside ? depth_of(shape, key) : 0;
}

// A score in units of ln 2, and its slope by the scaled product.
template <bool kRules>
__device__ __forceinline__ Score<float> log2_score(const Shape& shape, float product, float scale, float to_log2) {
  if (!kRules || shape.soft_cap == 0) return {product * to_log2, 1.f};
  const Score<float> score = capped(product * scale, static_cast<float>(shape.soft_cap));
  return {score.value * kLog2E, score.slope};
}

}  // namespace espalier::cuda
