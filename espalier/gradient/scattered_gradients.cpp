#include "espalier/gradient/scattered_gradients.h"

#include <algorithm>
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

// One unit leaves at a time, and what stands where the next one is brought has left before.
void ScatteredGradients::enter(const Stop& stop) {
  if (!stop.adds_gradients) return;
  for (const Unit& unit : table_.units().all) {
    if (unit.what != stop.unit || !unit.sharded()) continue;
    const auto is_in_room = [&](const Leaving& other) {
      return other.unit->room < unit.room + unit.whole() && unit.room < other.unit->room + other.unit->whole();
    };
    if (std::ranges::any_of(leaving_, is_in_room)) finish();
    device_.operations().zero(rooms_.narrow(0, unit.room, unit.whole()));
  }
}

void ScatteredGradients::leave(const Stop& stop) {
  if (!stop.adds_gradients) return;
  finish();
  for (const Unit& unit : table_.units().all)
    if (unit.what == stop.unit && unit.sharded())
      leaving_.push_back({&unit, holders_of(unit, mesh_)
                                     .start_scatter_sum(rooms_.narrow(0, unit.room, unit.whole()), sum_of(unit),
                                                        "gradient of " + name_of(unit))});
}

void ScatteredGradients::finish() {
  for (Leaving& one : leaving_) {
    one.sum.wait();
    device_.operations().add_scatter(sum_of(*one.unit).unsqueeze(0), first_row_1_,
                                     kept_.narrow(0, one.unit->place, one.unit->part()).unsqueeze(0));
  }
  leaving_.clear();
}

}  // namespace espalier
