#include "espalier/program/step_kind.h"

#include <algorithm>
#include <set>

#include "espalier/options/token_rules.h"
#include "espalier/rollout/trajectories.h"

namespace espalier {

bool needs_whole_rollout(const Options& options, std::span<const Rollout> rollouts) {
  if (row_of(options.policy_loss).needs_whole_rollout || options.ratio_level == RatioLevel::sequence) return true;
  const auto lacks_old = [](const Rollout& rollout) {
    return rollout.old_logprobs.empty() && !rollout.response_ids.empty();
  };
  return std::ranges::any_of(token_rule_rows(), [&](const TokenRuleRow& rule) {
    if (rule.sees == RuleSees::token || !rule.holds(options)) return false;
    return rule.sees == RuleSees::sequence || std::ranges::any_of(rollouts, lacks_old);
  });
}

bool needs_sequence_pass(const Options& options, std::span<const Rollout> rollouts) {
  if (!needs_whole_rollout(options, rollouts) || loss_unit_of(rollouts, options.loss_unit) != LossUnit::trajectory)
    return false;
  const auto has_loss = [&](std::int64_t index) {
    return std::ranges::find(rollouts[static_cast<std::size_t>(index)].loss_mask, 1) !=
           rollouts[static_cast<std::size_t>(index)].loss_mask.end();
  };
  return std::ranges::any_of(trajectories_of(rollouts).turns,
                             [&](const auto& turns) { return std::ranges::count_if(turns, has_loss) > 1; });
}

DeviceTraits traits_of(DeviceType device) {
  const bool gpu = device != DeviceType::cpu;
  return {.cuda = false, .queued = gpu, .writes_sums = gpu};
}

StepKind forward_kind_of(const ModelShape& shape, std::span<const Rollout> rollouts) {
  if (shape.value_head) return kForwardOnly;
  std::set<double> temperatures;
  StepKind kind{.gradients = false};
  for (const Rollout& rollout : rollouts) {
    temperatures.insert(rollout.temperature);
    const KeptSets& sets = rollout.kept_sets;
    kind.kept_ids += std::ssize(sets.ids);
    for (std::size_t t = 0; t + 1 < sets.begin.size(); ++t)
      kind.largest_kept_set = std::max(kind.largest_kept_set, std::ssize(sets.at(t)));
  }
  kind.temperatures = std::max<std::int64_t>(1, std::ssize(temperatures));
  return kind;
}

StepKind step_kind_of(const Options& options, const ModelShape& shape, std::span<const Rollout> rollouts,
                      bool counted) {
  StepKind kind = forward_kind_of(shape, rollouts);
  kind.gradients = true;
  if (shape.value_head) return kind;
  kind.sequence_pass = needs_sequence_pass(options, rollouts);
  kind.whole_rollout = !kind.sequence_pass && needs_whole_rollout(options, rollouts);
  if (shape.experts == 0) return kind;
  const bool balanced = options.router_aux_loss_coef != 0;
  kind.all_rows_choose = balanced || options.router_z_loss_coef != 0;
  kind.counting_pass = balanced && options.router_aux_loss_scope == AuxScope::minibatch && !counted;
  kind.counts_rollouts = balanced && options.router_aux_loss_scope == AuxScope::rollout;
  return kind;
}

}  // namespace espalier
