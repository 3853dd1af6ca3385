#include "espalier/train/step.h"

#include <algorithm>
#include <optional>

#include "espalier/base/error.h"
#include "espalier/base/mutation.h"
#include "espalier/base/units.h"
#include "espalier/grouping/prefix_tree.h"
#include "espalier/model/dispatch.h"
#include "espalier/observe/memory.h"
#include "espalier/observe/timer.h"
#include "espalier/phase/schedule.h"
#include "espalier/plan/planner.h"

namespace espalier {
namespace {

double layer_product_flops(const std::vector<PlanItem>& items, const ModelShape& shape) {
  double flops = 0;
  for (const PlanItem& item : items) {
    const Work work{item.set.rows, item.set.pairs, item.set.outputs, item.set.output_pairs};
    flops += step_flops(shape, work, {}, item.state == TrunkState::recompute).layers;
    flops += layer_product_flops(item.below, shape);
  }
  return flops;
}

StepProfile profile_of(const Timer& timer, const GradientReport& report, const Actor& actor) {
  StepProfile profile;
  double rest = report.seconds.total;
  for (const std::string_view name : {part::kPlan, part::kProducts, part::kAttention, part::kRows, part::kHead}) {
    profile.seconds.emplace_back(name, timer.seconds(name));
    rest -= timer.seconds(name);
  }
  profile.seconds.emplace_back("other", rest);
  const double products = timer.seconds(part::kProducts);
  if (products > 0)
    profile.product_flops_per_second = layer_product_flops(report.plan.items, actor.model.shape) / products;
  for (const MachineProfile::Rate& rate : actor.machine.matrix)
    profile.measured_flops_per_second = std::max(profile.measured_flops_per_second, rate.flops_per_second);
  return profile;
}

moe::RouterLosses router_losses_of(const Options& options) {
  const bool whole = options.router_aux_loss_scope == "minibatch";
  return {options.router_aux_loss_coef, options.router_z_loss_coef,
          whole ? moe::AuxScope::minibatch : moe::AuxScope::rollout};
}

moe::RouterShape router_shape_of(const ModelShape& shape) {
  return {0, shape.experts, shape.experts_per_token, shape.norm_topk_prob};
}

// The accounting of a mini-batch's routers; none where no router loss is on.
std::optional<moe::LoadAccounting> accounting_of(const Actor& actor, std::span<const Rollout> batch) {
  const moe::RouterLosses losses = router_losses_of(actor.options);
  if (!losses.any()) return std::nullopt;
  if (actor.model.shape.experts == 0)
    throw OptionError({losses.aux_coef != 0 ? "--router-aux-loss-coef" : "--router-z-loss-coef", "a model with routers",
                       actor.model.shape.architecture, "leave the option out for dense models"});
  std::vector<std::int64_t> lengths;
  for (const Rollout& rollout : batch) lengths.push_back(rollout.length());
  return moe::LoadAccounting(actor.model.shape.layers, router_shape_of(actor.model.shape), std::move(lengths), losses);
}

// One forward of the plan for the choices of its routers alone.
void count_choices(Actor& actor, std::span<const Rollout> batch, const StepPlan& plan,
                   moe::LoadAccounting& accounting) {
  const ArenaScope scope(actor.arena);
  KvPath path(actor.model.shape, plan.max_path_rows, actor.model.decoder.dtype(), false, actor.arena);
  StepRun run{actor.model.decoder, batch, path, actor.arena};
  run.accounting = &accounting, run.counts_only = true;
  run_schedule(run, plan);
  accounting.finish_counting();
}

RouterReport report_of(const moe::LoadAccounting& accounting, const ModelShape& shape) {
  RouterReport report{accounting.aux_loss(), accounting.z_loss(), accounting.needs_counting_pass(), {}};
  for (std::int64_t layer = 0; layer < shape.layers; ++layer) {
    report.load.emplace_back();
    if (!has_experts(shape, layer)) continue;
    const auto load = accounting.load(layer);
    report.load.back().assign(load.begin(), load.end());
  }
  return report;
}

}  // namespace

Actor::Actor(ModelState& model_state, const Options& run_options, const MachineProfile& machine_profile)
    : model(model_state),
      options(run_options),
      machine(machine_profile),
      gradients(model.table, model.shape, accumulator_type(scalar_type(model.dtype))),
      arena(arena_limit(run_options)) {}

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

GradientReport compute_gradient(Actor& actor, const MiniBatch& batch, bool all_logprobs) {
  Timer timer;
  GradientReport report;
  Objective objective(batch.rollouts, batch.advantages, actor.options);
  const StepKind kind{true, actor.has_optimizer, objective.needs_whole_rollout()};
  {
    const TimedPart timed(timer, part::kPlan);
    report.plan = plan_step(actor.model.shape, actor.options, actor.machine, batch.rollouts, all_logprobs, kind);
  }
  std::optional<moe::LoadAccounting> accounting = accounting_of(actor, batch.rollouts);
  if (accounting && accounting->needs_counting_pass()) {
    const Timer counting;
    count_choices(actor, batch.rollouts, report.plan, *accounting);
    report.seconds.counting = counting.total();
  }
  if (!ESPALIER_MUTATION(gradients_not_zeroed)) actor.gradients.zero();
  const ArenaScope scope(actor.arena);
  KvPath path(actor.model.shape, report.plan.max_path_rows, actor.model.decoder.dtype(), true, actor.arena);
  StepRun run{actor.model.decoder, batch.rollouts, path, actor.arena, &objective, &actor.gradients, all_logprobs};
  if (accounting) run.accounting = &*accounting;
  if (actor.options.profile) run.timer = &timer;
  if (actor.on_share) {
    const auto all_rows = static_cast<double>(std::max<std::int64_t>(1, report.plan.physical_rows()));
    run.on_rows = [&actor, all_rows](std::int64_t rows) { actor.on_share(static_cast<double>(rows) / all_rows); };
  }
  run_schedule(run, report.plan);

  report.loss = objective.parts();
  if (accounting) {
    report.router = report_of(*accounting, actor.model.shape);
    report.loss.loss += accounting->weighted_loss();
  }
  report.trunk_rows = run.trunk_rows, report.wave_rows = run.wave_rows, report.trunk_forwards = run.trunk_forwards;
  report.series = std::move(run.series);
  report.seconds.phases = run.seconds;
  report.seconds.plan = timer.seconds(part::kPlan);
  report.seconds.total = timer.total();
  if (actor.options.profile) report.profile = profile_of(timer, report, actor);
  report.arena_bytes = run.arena_bytes;
  const std::int64_t held = resident_bytes() - actor.arena.touched();
  for (auto peak : {&PhasePeaks::a, &PhasePeaks::b, &PhasePeaks::c})
    report.peak_bytes.*peak = run.arena_bytes.*peak == 0 ? 0 : held + run.arena_bytes.*peak;
  return report;
}

StepReport run_step(Actor& actor, AdamW& optimizer, const MiniBatch& batch, bool all_logprobs) {
  StepReport report;
  actor.has_optimizer = true;
  report.gradient = compute_gradient(actor, batch, all_logprobs);
  GradientReport& gradient = report.gradient;
  const Timer timer;
  report.update = optimizer.step(actor.gradients.flat());
  report.step = optimizer.steps_done();
  gradient.seconds.optimizer = timer.total();
  gradient.seconds.total += gradient.seconds.optimizer;
  if (gradient.profile) {  // before the rest, which comes last
    auto& parts = gradient.profile->seconds;
    parts.emplace(parts.end() - 1, part::kOptimizer, gradient.seconds.optimizer);
  }
  return report;
}

}  // namespace espalier
