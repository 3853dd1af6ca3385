// Input of one forward: tokens, their positions, and the rows whose outputs are needed. The rows attend through
// a KvSource (model/kv_source.h).
//
// Shapes: T rows, O output rows, L layers of experts, k experts a row. The vectors are the host's; add_to hands them
// over as the tensors that operations read.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

#include "espalier/device/control_block.h"

namespace espalier {

struct ModelInput {
  std::vector<std::int32_t> id;               // [T]
  std::vector<std::int32_t> position;         // [T], depth along the path
  std::vector<std::int32_t> output_row;       // [O], ascending; a row occurs once per temperature asked of it
  std::vector<std::int32_t> output_position;  // [O]

  // Experts that rows are given, [L, T, k], and those of output rows in the last layer, [O, k]; a row whose first entry
  // is negative chooses freely in that layer. Empty: all do.
  std::vector<std::int32_t> given, given_output;
  bool all_rows_choose = false;  // a last layer of experts runs all rows, not only those with an output
  bool keeps_choices = false;    // DecoderSaved::choice_LTK is wanted

  // On the device, after add_to; tensors of given experts are undefined where the vectors are empty.
  at::Tensor id_T, position_T, output_row_O, output_position_O, given_LTK, given_output_OK;

  std::int64_t rows() const { return static_cast<std::int64_t>(id.size()); }
  std::int64_t outputs() const { return static_cast<std::int64_t>(output_row.size()); }

  // Adds all of the above to the block, whose own hand_over then sets the tensors: this object must not move before.
  void add_to(ControlBlock& block);
};

}  // namespace espalier
