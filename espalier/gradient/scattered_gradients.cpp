#include "espalier/gradient/scattered_gradients.h"

#include <utility>
#include <vector>

#include "espalier/device/control_block.h"
#include "espalier/model/gathered_weights.h"
#include "espalier/ops/operations.h"

namespace espalier {

ScatteredGradients::ScatteredGradients(const ParameterTable& table, at::Tensor kept, at::Tensor rooms, const Mesh& mesh,
                                       Device& device)
    : table_(table), kept_(std::move(kept)), rooms_(std::move(rooms)), mesh_(mesh), device_(device) {
  ControlBlock block;
  block.add(std::vector<std::int32_t>{0}, first_row_1_);
  block.hand_over(device);
}

void ScatteredGradients::bring(std::int64_t what) {
  for (const Unit& unit : table_.units().all)
    if (unit.what == what && unit.divided()) device_.operations().zero(rooms_.narrow(0, unit.room, unit.whole()));
}

void ScatteredGradients::let_go(std::int64_t what) {
  for (const Unit& unit : table_.units().all) {
    if (unit.what != what || !unit.divided()) continue;
    const at::Tensor sum = rooms_.narrow(0, table_.units().rooms, unit.part());
    holders_of(unit, mesh_).scatter_sum(rooms_.narrow(0, unit.room, unit.whole()), sum);
    device_.operations().add_scatter(sum.unsqueeze(0), first_row_1_,
                                     kept_.narrow(0, unit.place, unit.part()).unsqueeze(0));
  }
}

}  // namespace espalier
