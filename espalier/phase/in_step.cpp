#include "espalier/phase/in_step.h"

#include <algorithm>
#include <string>
#include <utility>

#include "espalier/base/error.h"

namespace espalier {

InStep::InStep(const Mesh& mesh, const StepPlan& plan) {
  bool path_divided = plan.path.divided;
  if (mesh.cp.size() > 1) path_divided = maxima_over_ranks(mesh.dp, {path_divided ? 1.0 : 0.0}).front() > 0;
  const RankRange together = joint_ranks(mesh.degrees, mesh.place(), path_divided);
  if (together.count == 1) return;
  const std::int64_t cp = mesh.cp.size(), end = together.begin + together.count;
  std::vector<std::string> all;
  if (cp % together.count == 0) {  // all have this plan
    for (std::int64_t rank = together.begin; rank < end; ++rank) all.push_back(events_of(plan.items, rank % cp));
  } else {
    const std::string own = events_of(plan.items, mesh.cp.rank());
    for (int rank = 0; rank < mesh.replicas.size(); ++rank) {
      std::string events = text_of_rank(mesh.replicas, own, rank);
      if (rank >= together.begin && rank < end) all.push_back(std::move(events));
    }
  }
  const std::int64_t place = mesh.replicas.rank() - together.begin;
  const auto on_path = [&](const JointEvent& next) {  // where it is divided all ranks of cp are together
    const auto first = next.own.begin() + (place - mesh.cp.rank());
    return plan.path.divided && std::count(first, first + cp, 1) > 0;
  };
  for (const JointEvent& next : joint_order(std::move(all), cp, together.begin))
    order_.push_back({next.event, next.own[static_cast<std::size_t>(place)] != 0, on_path(next)});
}

std::int64_t InStep::joined_below() const {
  std::int64_t count = 0, depth = 1;
  for (std::size_t turn = next_; turn < order_.size() && depth > 0; ++turn) {
    if (order_[turn].own && order_[turn].event == Event::open) ++depth;
    if (order_[turn].own && order_[turn].event == Event::close) --depth;
    if (!order_[turn].own && order_[turn].on_path) ++count;
  }
  return count;
}

std::int64_t InStep::backwards() const {
  return std::ranges::count_if(order_, [](const Turn& turn) { return turn.event != Event::open; });
}

std::optional<InStep::Turn> InStep::take_of_others() {
  if (next_ == order_.size() || order_[next_].own) return {};
  return order_[next_++];
}

void InStep::take_own(Event event) {
  if (order_.empty()) return;
  ESPALIER_INTERNAL(next_ < order_.size() && order_[next_].own && order_[next_].event == event);
  ++next_;
}

}  // namespace espalier
