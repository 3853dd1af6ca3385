#include "espalier/program/step_kind.h"

#include <algorithm>
#include <cmath>
#include <set>

namespace espalier {

bool needs_whole_rollout(const Options& options, std::span<const Rollout> rollouts) {
  if (row_of(options.policy_loss).needs_whole_rollout || options.ratio_level == RatioLevel::sequence ||
      std::isfinite(options.off_policy_threshold))
    return true;
  if (options.rollout_is != RolloutCorrection::sequence) return false;
  return std::ranges::any_of(
      rollouts, [](const Rollout& rollout) { return rollout.old_logprobs.empty() && !rollout.response_ids.empty(); });
}

DeviceTraits traits_of(DeviceType device) {
  const bool gpu = device != DeviceType::cpu;
  return {.cuda = false, .queued = gpu, .writes_sums = gpu};
}

StepKind forward_kind_of(const ModelShape& shape, std::span<const Rollout> rollouts) {
  if (shape.value_head) return kForwardOnly;
  std::set<double> temperatures;
  for (const Rollout& rollout : rollouts) temperatures.insert(rollout.temperature);
  return {.gradients = false, .temperatures = std::max<std::int64_t>(1, std::ssize(temperatures))};
}

StepKind step_kind_of(const Options& options, const ModelShape& shape, std::span<const Rollout> rollouts,
                      bool counted) {
  StepKind kind = forward_kind_of(shape, rollouts);
  kind.gradients = true;
  if (shape.value_head) return kind;
  kind.whole_rollout = needs_whole_rollout(options, rollouts);
  if (shape.experts == 0) return kind;
  const bool balanced = options.router_aux_loss_coef != 0;
  kind.all_rows_choose = balanced || options.router_z_loss_coef != 0;
  kind.counting_pass = balanced && options.router_aux_loss_scope == AuxScope::minibatch && !counted;
  kind.counts_rollouts = balanced && options.router_aux_loss_scope == AuxScope::rollout;
  return kind;
}

}  // namespace espalier
