#include "espalier/measure/step_profile.h"

#include <algorithm>

#include "espalier/plan/rank_layout.h"
#include "espalier/program/row_shares.h"

namespace espalier {
namespace {

double layer_product_flops(const std::vector<PlanItem>& items, const LocalShape& rank, const StepKind& kind) {
  double flops = 0;
  for (const PlanItem& item : items) {
    if (!runs_on(item, rank.place().cp)) continue;
    const Flops of_item = step_flops(rank.own(), work_on(item, rank), kind, item.state);
    flops += of_item.layers + of_item.experts + layer_product_flops(item.below, rank, kind);
  }
  return flops;
}

}  // namespace

std::vector<StepTraffic::OfAxis> StepTraffic::by_axis() const {
  std::vector<OfAxis> axes;
  for (const auto& event : events) {
    auto axis = std::ranges::find(axes, event->axis, &OfAxis::axis);
    if (axis == axes.end()) axis = axes.insert(axis, {event->axis});
    ++axis->calls;
    axis->bytes += event->bytes;
    axis->seconds += event->seconds();
    axis->hidden += event->hidden();
  }
  return axes;
}

StepProfile profile_of(const Timer& timer, double total, const StepPlan& plan, const LocalShape& rank, StepKind kind,
                       const MachineProfile& machine) {
  StepProfile profile;
  double rest = total;
  for (const std::string_view name :
       {part::kPlan, part::kCounting, part::kProducts, part::kAttention, part::kRows, part::kHead}) {
    if (name == part::kCounting && !kind.counting_pass) continue;
    profile.seconds.emplace_back(name, timer.seconds(name));
    rest -= timer.seconds(name);
  }
  profile.seconds.emplace_back("other", rest);
  const double products = timer.seconds(part::kProducts);
  kind.counting_pass = kind.sequence_pass = false;  // their products are not in that part
  if (products > 0) profile.product_flops_per_second = layer_product_flops(plan.items, rank, kind) / products;
  for (const MachineProfile::Rate& rate : machine.matrix)
    profile.measured_flops_per_second = std::max(profile.measured_flops_per_second, rate.flops_per_second);
  return profile;
}

}  // namespace espalier
