#include "espalier/execute/penalty_values.h"

#include <algorithm>

#include "espalier/device/host_values.h"

namespace espalier {

PenaltyValues::PenaltyValues(const StepRun& step, const Program& program) : step_(step) {
  if (!step.trains() || step.accounting == nullptr || !step.accounting->has_losses()) return;
  const std::int64_t items =
      std::ranges::count_if(program, [](const Step& one) { return one.own != nullptr && one.pass == Pass::backward; });
  Device& device = step.decoder.device();
  values_IL2_ = device.allocate({items, step.decoder.shape().expert_layers(), 2}, at::kDouble);
  device.operations().zero(values_IL2_);  // nobody writes where a rank has no rows of an item
}

void PenaltyValues::add_up() const {
  if (!values_IL2_.defined()) return;
  const at::Tensor on_host = step_.decoder.device().to_host(values_IL2_);
  const auto values = host_values<const double>(on_host);
  const std::size_t of_item = 2 * static_cast<std::size_t>(step_.decoder.shape().expert_layers());
  for (std::size_t item = 0; item < values.size(); item += of_item)
    for (std::size_t at = item + of_item; at > item; at -= 2) step_.accounting->add({values[at - 2], values[at - 1]});
}

}  // namespace espalier
