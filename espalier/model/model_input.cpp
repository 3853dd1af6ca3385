#include "espalier/model/model_input.h"

namespace espalier {

void ModelInput::add_to(ControlBlock& block) {
  block.add(id, id_T);
  block.add(position, position_T);
  block.add(subtree_end, subtree_end_T);
  block.add(output_row, output_row_O);
  block.add(output_position, output_position_O);
  if (!recorded.empty()) {
    block.add(recorded, recorded_LTK);
    block.add(recorded_output, recorded_output_OK);
  }
  std::int64_t first_row = 0;
  std::size_t output = 0;
  std::vector<std::int32_t> of_outputs;
  for (RowGroup& group : groups) {
    const auto end = first_row + static_cast<std::int64_t>(group.own_row.size());
    of_outputs.clear();
    for (; output < output_row.size() && output_row[output] < end; ++output)
      of_outputs.push_back(group.own_row[static_cast<std::size_t>(output_row[output] - first_row)]);
    block.add(group.own_row, group.own_row_N);
    block.add(group.subtree_end, group.subtree_end_T);
    block.add(of_outputs, group.output_own_row);
    first_row = end;
  }
}

}  // namespace espalier
