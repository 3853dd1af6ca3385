// The tree-causal pattern of rows as runs: what attention by a library is composed of, here and in the Python package.
#pragma once

#include <cstdint>
#include <limits>
#include <span>
#include <vector>

namespace espalier {

inline constexpr std::int64_t kAnyRows = std::numeric_limits<std::int64_t>::max();

// Rows [first, end) see each other causally, a square; rows [end, below) all see all of them, a rectangle.
struct CausalRun {
  std::int32_t first, end, below;

  bool operator==(const CausalRun&) const = default;
};

// The runs of rows of which row i sees row j iff j <= i < subtree_end[j], in order. Every such pair is in one square or
// one rectangle. Neighbours with the same end are one run of at most `most_rows` rows; what is cut off goes on as the
// next one. A row's subtree ends no later than that of a row above it.
std::vector<CausalRun> causal_runs(std::span<const std::int32_t> subtree_end, std::int64_t most_rows = kAnyRows);

}  // namespace espalier
