// What one forward eats: tokens, where they stand, and which of them anything is asked of.
//
// Shapes: T rows, O output rows, P rows of the path above. Row i of the set sees all P path rows, and own row j iff
// j <= i < subtree_end[j]. The model never knows whether its rows are a trunk or a wave.
#pragma once

#include <cstdint>
#include <vector>

#include "espalier/model/row_group.h"
#include "espalier/moe/load_accounting.h"

namespace espalier {

struct Rows {
  std::vector<std::int32_t> id;               // [T]
  std::vector<std::int32_t> position;         // [T], depth along the path
  std::vector<std::int32_t> subtree_end;      // [T]
  std::vector<std::int32_t> output_row;       // [O], ascending; a row occurs once per temperature asked of it
  std::vector<std::int32_t> output_position;  // [O]
  std::int64_t path_rows = 0;                 // P
  bool in_path = false;                       // keys and values go to the top of the path (a trunk)

  // Recorded experts of each row, [expert layers, k]; null, or kFree first in a layer: routed freely. Empty: nothing is
  // recorded.
  std::vector<const std::uint16_t*> route;
  // Where the experts that each row chose are written, laid out as `route`. Empty: nowhere.
  std::vector<std::uint16_t*> chosen;

  // Where not empty, every row belongs to one group, groups in order, and is kept and attends as its group says;
  // subtree_end is then empty and path_rows 0.
  std::vector<RowGroup> groups;

  // Router losses and loads of expert layers; null: none. `owners` covers all rows in order.
  moe::LoadAccounting* accounting = nullptr;
  std::vector<moe::RowOwners> owners;

  std::int64_t rows() const { return static_cast<std::int64_t>(id.size()); }
  std::int64_t outputs() const { return static_cast<std::int64_t>(output_row.size()); }
};

}  // namespace espalier
