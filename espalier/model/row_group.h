// Rows that append to sequences held elsewhere: tokens of prompts being read, or the newest token of each response.
//
// The rows of a group see the group's path [P] and, of the rows kept in `own`, those that the attention contract lets
// them see: own row j iff j <= r < subtree_end[j] for a row kept at r. Keys and values of the group's rows are written
// to `own` before anything reads them; rows of `own` that nobody wrote must hold finite numbers.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <span>
#include <vector>

namespace espalier {

class KvPath;

struct RowGroup {
  std::vector<std::int32_t> own_row;          // ascending: where the key and value of each of the group's rows are kept
  std::span<const std::int32_t> subtree_end;  // one per own row up to the last that is read
  const KvPath* own = nullptr;
  const KvPath* path = nullptr;  // may be `own` where path_rows is 0
  std::int64_t path_rows = 0;    // P

  // Of the device, after ModelInput::add_to: the same, and the own rows of the group's outputs.
  at::Tensor own_row_N, subtree_end_T, output_own_row;
};

}  // namespace espalier
