// Rows and visible pairs of a set of rows, which determine its operations and bytes (mathematics, section 9).
#pragma once

#include <cstdint>

namespace espalier {

// The work of a row set. The row at depth d sees d+1 rows, so pairs is the sum of (d+1) over the rows. In a layer with
// a window W the row sees min(d+1, W) rows.
struct Work {
  std::int64_t rows = 0, pairs = 0;                        // all rows
  std::int64_t outputs = 0, output_pairs = 0;              // rows with edges, counted as in RowSet
  std::int64_t window_pairs = 0, window_output_pairs = 0;  // in layers with a window; 0 if no layer has one
  std::int64_t forks = 0;                                  // runs that other runs of the set follow (RowRun)

  Work& operator+=(const Work& other) {
    rows += other.rows, pairs += other.pairs, outputs += other.outputs, output_pairs += other.output_pairs;
    window_pairs += other.window_pairs, window_output_pairs += other.window_output_pairs;
    forks += other.forks;
    return *this;
  }
  bool operator==(const Work&) const = default;
};

// The same rows, all of them outputs, as in a layer that is not narrow.
Work with_all_outputs(Work work);
// The work of rows at depths [begin, end), all with edges or all without, in a model with this window (0: none).
Work work_of_depths(std::int64_t begin, std::int64_t end, bool outputs, std::int64_t window = 0);
// The number of rows that the row at this depth sees in a layer with a window; 0 without a window.
inline std::int64_t pairs_in_window(std::int64_t depth, std::int64_t window) {
  return depth < window ? depth + 1 : window;
}

}  // namespace espalier
