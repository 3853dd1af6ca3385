#include "espalier/train/step.h"

#include <chrono>

#include "espalier/base/mutation.h"
#include "espalier/base/units.h"
#include "espalier/grouping/prefix_tree.h"
#include "espalier/model/dispatch.h"
#include "espalier/observe/memory.h"
#include "espalier/phase/schedule.h"
#include "espalier/plan/planner.h"

namespace espalier {
namespace {

double seconds_since(std::chrono::steady_clock::time_point begin) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

}  // namespace

Actor::Actor(ModelState& model_state, const Options& run_options, const MachineProfile& machine_profile)
    : model(model_state),
      options(run_options),
      machine(machine_profile),
      gradients(model.table, model.shape, accumulator_type(scalar_type(model.dtype))),
      arena(arena_limit(run_options)) {}

std::int64_t arena_limit(const Options& options) {
  return options.memory_budget.empty() ? available_bytes() : parse_bytes(options.memory_budget);
}

StepPlan plan_step(const ModelShape& shape, const Options& options, const MachineProfile& machine,
                   std::span<const Rollout> batch, bool all_logprobs) {
  PlanOptions plan_options = plan_options_of(options);
  plan_options.all_logprobs = all_logprobs;
  if (plan_options.memory_budget == 0) plan_options.memory_budget = resident_bytes() + arena_limit(options);
  const std::vector<PrefixTree> trees = build_prefix_trees(batch, share_mode_of(options));
  return make_plan(batch, trees, shape, plan_options, machine);
}

GradientReport compute_gradient(Actor& actor, const MiniBatch& batch, bool all_logprobs) {
  const auto begin = std::chrono::steady_clock::now();
  GradientReport report;
  report.plan = plan_step(actor.model.shape, actor.options, actor.machine, batch.rollouts, all_logprobs);
  report.seconds.plan = seconds_since(begin);

  Objective objective(batch.rollouts, batch.advantages, actor.options);
  if (!ESPALIER_MUTATION(gradients_not_zeroed)) actor.gradients.zero();
  const ArenaScope scope(actor.arena);
  KvPath path(actor.model.shape, report.plan.max_path_rows, actor.model.decoder.dtype(), true, actor.arena);
  StepRun run{actor.model.decoder, batch.rollouts, path, actor.arena, &objective, &actor.gradients, all_logprobs};
  run_schedule(run, report.plan);

  report.loss = objective.parts();
  report.trunk_rows = run.trunk_rows, report.wave_rows = run.wave_rows, report.trunk_forwards = run.trunk_forwards;
  report.series = std::move(run.series);
  report.seconds.phases = run.seconds;
  report.seconds.total = seconds_since(begin);
  const std::int64_t held = resident_bytes() - actor.arena.touched();
  for (auto peak : {&PhasePeaks::a, &PhasePeaks::b, &PhasePeaks::c})
    report.peak_bytes.*peak = run.arena_bytes.*peak == 0 ? 0 : held + run.arena_bytes.*peak;
  return report;
}

StepReport run_step(Actor& actor, AdamW& optimizer, const MiniBatch& batch, bool all_logprobs) {
  StepReport report;
  report.gradient = compute_gradient(actor, batch, all_logprobs);
  const auto begin = std::chrono::steady_clock::now();
  report.update = optimizer.step(actor.gradients.flat());
  report.step = optimizer.steps_done();
  report.gradient.seconds.optimizer = seconds_since(begin);
  report.gradient.seconds.total += report.gradient.seconds.optimizer;
  return report;
}

}  // namespace espalier
