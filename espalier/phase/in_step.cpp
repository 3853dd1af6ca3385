#include "espalier/phase/in_step.h"

#include <algorithm>
#include <string>
#include <utility>

#include "espalier/base/error.h"

namespace espalier {

InStep::InStep(const Mesh& mesh, const StepPlan& plan) {
  const RankRange together = joint_ranks(mesh.degrees, mesh.place());
  if (together.count == 1) return;
  const std::string own = events_of(plan.items, mesh.cp.rank());
  std::vector<std::string> all;
  for (int rank = 0; rank < mesh.replicas.size(); ++rank) {
    std::string events = text_of_rank(mesh.replicas, own, rank);
    if (rank >= together.begin && rank < together.begin + together.count) all.push_back(std::move(events));
  }
  const auto place = static_cast<std::size_t>(mesh.replicas.rank() - together.begin);
  for (const JointEvent& next : joint_order(std::move(all), mesh.cp.size(), together.begin))
    order_.push_back({next.event, next.own[place] != 0});
}

std::int64_t InStep::backwards() const {
  return std::ranges::count_if(order_, [](const Turn& turn) { return turn.event != Event::open; });
}

std::optional<Event> InStep::take_of_others() {
  if (next_ == order_.size() || order_[next_].own) return {};
  return order_[next_++].event;
}

void InStep::take_own(Event event) {
  if (order_.empty()) return;
  ESPALIER_INTERNAL(next_ < order_.size() && order_[next_].own && order_[next_].event == event);
  ++next_;
}

}  // namespace espalier
