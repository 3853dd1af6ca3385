// What one forward takes: tokens, where they stand, and which of them anything is asked of.
//
// Shapes: T rows, O output rows, P rows of the path above, L layers of experts, k experts a row. Row i of the set sees
// all P path rows, and own row j iff j <= i < subtree_end[j]. The model never knows whether its rows are a trunk or a
// wave. The vectors are the host's; add_to hands them over as the tensors that operations read.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

#include "espalier/device/control_block.h"
#include "espalier/model/row_group.h"
#include "espalier/ops/experts.h"

namespace espalier {

struct ModelInput {
  std::vector<std::int32_t> id;               // [T]
  std::vector<std::int32_t> position;         // [T], depth along the path
  std::vector<std::int32_t> subtree_end;      // [T]
  std::vector<std::int32_t> output_row;       // [O], ascending; a row occurs once per temperature asked of it
  std::vector<std::int32_t> output_position;  // [O]
  std::int64_t path_rows = 0;                 // P
  bool in_path = false;                       // keys and values go to the top of the path (a trunk)

  // Experts that rows are to choose, [L, T, k], and those of output rows in the last layer, [O, k]; a row whose first
  // entry is negative chooses freely in that layer. Empty: all do.
  std::vector<std::int32_t> recorded, recorded_output;
  bool routes_all_rows = false;  // a last layer of experts runs all rows, not only those with an output
  bool keeps_choices = false;    // DecoderSaved::choice is wanted

  // Where not empty, every row belongs to one group, groups in order, and is kept and attends as its group says;
  // subtree_end is then empty and path_rows 0.
  std::vector<RowGroup> groups;

  // Of the device, after add_to; recorded tensors are undefined where the vectors are empty.
  at::Tensor id_T, position_T, subtree_end_T, output_row_O, output_position_O, recorded_LTK, recorded_output_OK;
  // What router losses ask of each expert layer's backward, and where it leaves their values, [L, 2]; set by who runs
  // the backward and read once a step. Empty: nothing.
  std::vector<RouterPenalty> penalty_L;
  at::Tensor penalties_L2;

  std::int64_t rows() const { return static_cast<std::int64_t>(id.size()); }
  std::int64_t outputs() const { return static_cast<std::int64_t>(output_row.size()); }

  // Adds all of the above to the block, whose own hand_over then sets the tensors: this object must not move before.
  void add_to(ControlBlock& block);
};

}  // namespace espalier
