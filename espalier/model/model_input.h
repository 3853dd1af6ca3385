// Input of one forward: tokens, their positions, and the output rows. The rows attend through a KvSource
// (model/kv_source.h).
//
// Shapes: T rows, O output rows, L layers of experts, k experts a row. The vectors are on the host; add_to copies them
// to the device tensors that operations read.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

#include "espalier/device/control_block.h"

namespace espalier {

struct ModelInput {
  std::vector<std::int32_t> id;               // [T]
  std::vector<std::int32_t> position;         // [T], depth along the path
  std::vector<std::int32_t> output_row;       // [O], ascending; a row occurs once for each of its temperatures
  std::vector<std::int32_t> output_position;  // [O]

  // Given experts of the rows, [L, T, k], and of output rows in the last layer, [O, k]. A row with a negative first
  // entry uses its router's choice in that layer. Empty: all rows do.
  std::vector<std::int32_t> given, given_output;
  bool all_rows_choose = false;  // a last expert layer runs all rows, not only output rows
  bool keeps_choices = false;    // fills DecoderSaved::choice_LTK

  // On the device, after add_to; tensors of given experts are undefined if the vectors are empty.
  at::Tensor id_T, position_T, output_row_O, output_position_O, given_LTK, given_output_OK;

  std::int64_t rows() const { return static_cast<std::int64_t>(id.size()); }
  std::int64_t outputs() const { return static_cast<std::int64_t>(output_row.size()); }

  // Adds all of the above to the block. Its hand_over then sets the tensors; this object must not move before.
  void add_to(ControlBlock& block);
};

}  // namespace espalier
