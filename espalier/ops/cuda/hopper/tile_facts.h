// Facts of tiles for the kernels of this folder (key_tiles.h), and masks of scores in a warpgroup's registers.
#pragma once

#include "espalier/ops/cuda/hopper/products.h"
#include "espalier/ops/cuda/key_tiles.h"
#include "espalier/ops/cuda/launch.h"

namespace espalier::cuda::hopper {

inline constexpr int kFactQueries = 64;

// For tiles of these numbers of own keys and of queries.
class Facts {
 public:
  Facts(const Shape& shape, int keys, int queries = kFactQueries);
  const TileFacts& get() const { return facts_; }

 private:
  bool windows_;
  std::int64_t tiles_, query_tiles_;
  Scratch<std::int32_t> memory_;
  TileFacts facts_{};
};

// Sets the scores to -inf of keys of tile n that a row of this lane does not see. Selects, no branches: a branch for
// each element costs more than the mask.
template <class T>
__device__ __forceinline__ void mask(const Shape& shape, int n, const int (&row)[2],
                                     const FirstDepths<T::kRules>& first_depths, int t, float (&s)[T::kKeys / 2]) {
  const int path_rows = static_cast<int>(shape.path_rows), own_rows = static_cast<int>(shape.own_rows),
            of_path = (path_rows + T::kKeys - 1) / T::kKeys;
  const bool path = n < of_path;
  const int first = (path ? n : n - of_path) * T::kKeys + 2 * t;
  if (path) {
#pragma unroll
    for (int j = 0; j < T::kKeys / 8; ++j)
#pragma unroll
      for (int c = 0; c < 2; ++c)
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          const int key = first + 8 * j + c;
          float& score = s[4 * j + 2 * r + c];
          score = (key < path_rows) & first_depths.reach(r, key) ? score : -INFINITY;
        }
    return;
  }
#pragma unroll
  for (int j = 0; j < T::kKeys / 8; ++j)
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      const int key = first + 8 * j + c, end = key < own_rows ? shape.subtree_end[key] : 0;
      const std::int32_t depth = key_depth<T::kRules>(shape, false, key < own_rows, key);
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        float& score = s[4 * j + 2 * r + c];
        score = (key <= row[r]) & (row[r] < end) & first_depths.reach(r, depth) ? score : -INFINITY;
      }
    }
}

}  // namespace espalier::cuda::hopper
