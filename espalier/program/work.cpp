#include "espalier/program/work.h"

#include <algorithm>

namespace espalier {

Work with_all_outputs(Work work) {
  work.outputs = work.rows, work.output_pairs = work.pairs, work.window_output_pairs = work.window_pairs;
  return work;
}

Work work_of_depths(std::int64_t begin, std::int64_t end, bool outputs, std::int64_t window) {
  Work work;
  if (end <= begin) return work;
  work.rows = end - begin;
  // Rows at depths below `depth`.
  const auto pairs_below = [](std::int64_t depth) { return depth * (depth + 1) / 2; };
  const auto in_window = [&](std::int64_t depth) {
    const std::int64_t within = std::min(depth, window);
    return pairs_below(within) + (depth - within) * window;
  };
  work.pairs = pairs_below(end) - pairs_below(begin);
  work.window_pairs = in_window(end) - in_window(begin);
  return outputs ? with_all_outputs(work) : work;
}

}  // namespace espalier
