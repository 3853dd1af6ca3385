#include "espalier/train/step_statistics.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <vector>

#include "espalier/rollout/mini_batches.h"
#include "espalier/rollout/trajectories.h"

namespace espalier {
namespace {

constexpr std::array kRatioEdges = {0.5, 0.8, 0.9, 0.95, 0.99, 1.01, 1.05, 1.1, 1.2, 1.5, 2.0};

void add_rewards(Json& out, std::span<const Rollout> rollouts) {
  std::int64_t groups = 0, equal = 0, spread_of = 0;
  double deviations = 0, least = INFINITY, most = -INFINITY;
  const Trajectories trajectories = trajectories_of(rollouts);
  const auto earned = rewards_of(rollouts, trajectories);
  for (const std::vector<std::int64_t>& group : groups_of(rollouts)) {
    std::vector<double> rewards;
    for (const std::int64_t index : group) {
      const auto of = static_cast<std::size_t>(trajectories.of[static_cast<std::size_t>(index)]);
      if (earned[of] && trajectories.turns[of].front() == index) rewards.push_back(*earned[of]);
    }
    if (rewards.empty()) continue;
    const auto [low, high] = std::ranges::minmax(rewards);
    least = std::min(least, low), most = std::max(most, high);
    ++groups, equal += low == high;
    if (rewards.size() < 2) continue;
    double mean = 0, squares = 0;
    for (const double reward : rewards) mean += reward / static_cast<double>(rewards.size());
    for (const double reward : rewards) squares += (reward - mean) * (reward - mean);
    deviations += std::sqrt(squares / static_cast<double>(rewards.size() - 1)), ++spread_of;
  }
  if (groups == 0) return;
  out["groups"] = groups, out["groups_without_variance"] = equal;
  out["reward_spread"] = {
      {"std", spread_of > 0 ? deviations / static_cast<double>(spread_of) : 0.0}, {"min", least}, {"max", most}};
}

void add_truncated(Json& out, std::span<const Rollout> rollouts) {
  double known = 0, truncated = 0;
  for (const Rollout& rollout : rollouts) {
    if (rollout.carried.find("\"finish_reason\"") == std::string::npos) continue;
    const Json carried = Json::parse(rollout.carried);
    const auto reason = carried.find("finish_reason");
    if (reason == carried.end() || !reason->is_string()) continue;
    known += 1, truncated += *reason == "length";
  }
  if (known > 0) out["truncated"] = truncated / known;
}

void add_ratios(Json& out, std::span<const Rollout> rollouts, std::span<const RolloutSeries> series) {
  if (series.size() != rollouts.size()) return;
  std::vector<std::int64_t> counts(kRatioEdges.size() + 1);
  bool any = false;
  for (std::size_t i = 0; i < rollouts.size(); ++i) {
    const Rollout& rollout = rollouts[i];
    if (rollout.old_logprobs.empty()) continue;
    for (std::size_t t = 0; t < rollout.loss_mask.size(); ++t) {
      if (rollout.loss_mask[t] == 0) continue;
      const double ratio = std::exp(series[i].logprob[t] - rollout.old_logprobs[t]);
      ++counts[static_cast<std::size_t>(std::ranges::upper_bound(kRatioEdges, ratio) - kRatioEdges.begin())];
      any = true;
    }
  }
  if (any) out["ratio_histogram"] = {{"edges", kRatioEdges}, {"counts", counts}};
}

void add_speed(Json& out, const GradientReport& gradient, const MachineProfile& machine) {
  if (gradient.seconds.total > 0)
    out["tokens_per_second"] = static_cast<double>(gradient.plan.logical_rows) / gradient.seconds.total;
  const double seconds =
      gradient.seconds.phases.trunk_forward + gradient.seconds.phases.waves + gradient.seconds.phases.trunk_backward;
  double best = 0;
  for (const MachineProfile::Rate& rate : machine.matrix) best = std::max(best, rate.flops_per_second);
  if (seconds > 0 && best > 0) out["mfu"] = gradient.plan.chosen.flops / seconds / best;
}

}  // namespace

Json step_statistics(const StepReport& report, std::span<const Rollout> rollouts, const MachineProfile& machine) {
  Json out = Json::object();
  add_rewards(out, rollouts);
  add_truncated(out, rollouts);
  add_ratios(out, rollouts, report.gradient.series);
  add_speed(out, report.gradient, machine);
  return out;
}

}  // namespace espalier
