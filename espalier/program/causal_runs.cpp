#include "espalier/program/causal_runs.h"

namespace espalier {

std::vector<CausalRun> causal_runs(std::span<const std::int32_t> subtree_end, std::int64_t most_rows) {
  std::vector<CausalRun> runs;
  for (std::size_t first = 0, end = 0; first < subtree_end.size(); first = end) {
    // Neighbours with the same end follow each other on one branch: each sees those before it.
    while (end < subtree_end.size() && subtree_end[end] == subtree_end[first] &&
           static_cast<std::int64_t>(end - first) < most_rows)
      ++end;
    runs.push_back({static_cast<std::int32_t>(first), static_cast<std::int32_t>(end), subtree_end[first]});
  }
  return runs;
}

}  // namespace espalier
