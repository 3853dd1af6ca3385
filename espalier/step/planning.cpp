#include "espalier/step/planning.h"

#include "espalier/base/error.h"
#include "espalier/base/units.h"
#include "espalier/grouping/prefix_tree.h"
#include "espalier/observe/memory.h"
#include "espalier/plan/memory_model.h"
#include "espalier/plan/planner.h"

namespace espalier {

std::int64_t arena_limit(const Options& options) {
  return options.memory_budget.empty() ? available_bytes() : parse_bytes(options.memory_budget, "--memory-budget");
}

std::int64_t bytes_of_model(const ModelShape& shape, const Options& options, const StepKind& kind) {
  return ActivationBytes(shape, options.dtype, kind).model();
}

void require_room(const ModelShape& shape, const Options& options, const StepKind& kind) {
  const ActivationBytes bytes(shape, options.dtype, kind);
  const std::int64_t needed = bytes.constant(), own = needed - bytes.model() - kind.beside_bytes;
  const bool given = !options.memory_budget.empty();
  const std::int64_t room = given ? arena_limit(options) : resident_bytes() + arena_limit(options);
  if (needed <= room) return;
  const char* what = kind.optimizer   ? "weights, gradients and optimizer state"
                     : kind.gradients ? "weights and gradients"
                                      : "weights";
  std::string remedy = given ? text_of("Raise --memory-budget above ", format_bytes(needed), " (", needed, " bytes)")
                             : "Free memory, or take a machine with more";
  if (options.dtype != DType::bfloat16) remedy += ", or take --dtype bfloat16";
  throw MemoryBudgetError(
      {given ? "--memory-budget" : "memory",
       text_of("more than ", format_bytes(needed), ": ", format_bytes(bytes.model()), " of ", what,
               kind.beside_bytes > 0 ? text_of(", ", format_bytes(kind.beside_bytes), " of other models") : "", " and ",
               format_bytes(own), " that the process itself takes"),
       text_of(format_bytes(room), given ? "" : " free"), remedy});
}

StepPlan plan_step(const ModelShape& shape, const Options& options, const MachineProfile& machine,
                   std::span<const Rollout> batch, bool all_logprobs, const StepKind& kind) {
  PlanOptions plan_options = plan_options_of(options);
  plan_options.all_logprobs = all_logprobs;
  plan_options.kind = kind;
  if (plan_options.memory_budget == 0) plan_options.memory_budget = resident_bytes() + arena_limit(options);
  const std::vector<PrefixTree> trees = build_prefix_trees(batch, options.share);
  return make_plan(batch, trees, shape, plan_options, machine);
}

}  // namespace espalier
