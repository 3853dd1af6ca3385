#include "espalier/train/planning.h"

#include "espalier/base/units.h"
#include "espalier/grouping/prefix_tree.h"
#include "espalier/observe/memory.h"
#include "espalier/plan/planner.h"

namespace espalier {

std::int64_t arena_limit(const Options& options) {
  return options.memory_budget.empty() ? available_bytes() : parse_bytes(options.memory_budget, "--memory-budget");
}

StepPlan plan_step(const ModelShape& shape, const Options& options, const MachineProfile& machine,
                   std::span<const Rollout> batch, bool all_logprobs, const StepKind& kind) {
  PlanOptions plan_options = plan_options_of(options);
  plan_options.all_logprobs = all_logprobs;
  plan_options.kind = kind;
  if (plan_options.memory_budget == 0) plan_options.memory_budget = resident_bytes() + arena_limit(options);
  const std::vector<PrefixTree> trees = build_prefix_trees(batch, share_mode_of(options));
  return make_plan(batch, trees, shape, plan_options, machine);
}

}  // namespace espalier
