// Where the files of a model, or of what a run adds to it, hold a parameter.
#pragma once

#include <algorithm>
#include <cstdint>
#include <functional>
#include <numeric>
#include <string>
#include <vector>

namespace espalier {

// By default a parameter is a tensor of its own name and shape. It may have another name there, or be a part of a
// tensor: element (i, j) of a parameter [rows, columns] is then element first + i row_step + j column_step of it.
// Parameters with one dimension have one column.
struct FilePlace {
  std::string tensor = {};               // "": the parameter's own name
  std::vector<std::int64_t> shape = {};  // of the tensor; empty: the parameter is the whole tensor
  std::int64_t rows = 0, columns = 0;    // of the parameter
  std::int64_t first = 0, row_step = 0, column_step = 1;

  bool is_part() const { return !shape.empty(); }
  std::int64_t at(std::int64_t i, std::int64_t j) const { return first + i * row_step + j * column_step; }
  std::int64_t end() const { return at(rows - 1, columns - 1) + 1; }  // behind the last of its elements
  // True if its elements follow each other in the tensor.
  bool is_contiguous() const { return (columns == 1 || column_step == 1) && (rows == 1 || row_step == columns); }
  // Elements of the tensor.
  std::int64_t size() const {
    return std::accumulate(shape.begin(), shape.end(), std::int64_t{1}, std::multiplies<>());
  }
};

}  // namespace espalier
