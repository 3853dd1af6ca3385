#include "espalier/model/model_input.h"

namespace espalier {

void ModelInput::add_to(ControlBlock& block) {
  block.add(id, id_T);
  block.add(position, position_T);
  block.add(output_row, output_row_O);
  block.add(output_position, output_position_O);
  if (given.empty()) return;
  block.add(given, given_LTK);
  block.add(given_output, given_output_OK);
}

}  // namespace espalier
