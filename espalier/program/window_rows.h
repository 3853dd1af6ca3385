// The rows of a path that layers with a window keep: rows below see only its last rows.
#pragma once

#include <algorithm>
#include <cstdint>

namespace espalier {

// Kept rows begin at a multiple of this depth, so that a GPU's kernels cut keys into the tiles of the whole path. (Sums
// on a CPU do not depend on where keys begin: mathematics, section 18.)
inline constexpr std::int64_t kWindowBlockRows = 64;

// The depth of the first row that a window of W rows can show to rows below `rows` path rows; W = 0, no window: 0.
inline std::int64_t first_window_row(std::int64_t rows, std::int64_t window) {
  if (window == 0) return 0;
  return std::max<std::int64_t>(0, rows - (window - 1)) / kWindowBlockRows * kWindowBlockRows;
}

// The rows that a trunk of the path rows [begin, end) keeps for everything below it.
inline std::int64_t window_rows_kept(std::int64_t begin, std::int64_t end, std::int64_t window) {
  return end - std::max(begin, first_window_row(end, window));
}

// Rows of the open trunks, or their maximum over time. `all`: all rows. `window`: the rows that window layers keep.
struct PathRows {
  std::int64_t all = 0, window = 0;
};

}  // namespace espalier
