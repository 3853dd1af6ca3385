#include "espalier/step/pass.h"

#include <ATen/core/LegacyTypeDispatch.h>

#include <cmath>
#include <memory>
#include <optional>
#include <utility>

#include "espalier/base/error.h"
#include "espalier/device/scalar_type.h"
#include "espalier/execute/stage.h"
#include "espalier/gradient/reduction.h"
#include "espalier/state/planning.h"
#include "espalier/step/over_ranks.h"
#include "espalier/step/step_path.h"

namespace espalier {

Learner::Learner(ModelState& model_state, const Options& run_options, const MachineProfile& machine_profile,
                 Workspace& shared, AdamW* its_optimizer)
    : Holder(shared),
      model(model_state),
      options(run_options),
      machine(machine_profile),
      gradients(model.table, model.decoder.local(), accumulator_type(scalar_type(model.dtype)), model.decoder.device(),
                model.mesh),
      workspace(shared),
      optimizer(its_optimizer) {}

HeldModel Learner::held() const {
  HeldState state{.optimizer = optimizer != nullptr};
  if (optimizer != nullptr) state.optimizer_shares = optimizer->shares().size();
  return {model.decoder.local(), state};
}

PassReport run_gradient_pass(Learner& learner, std::span<const Rollout> rollouts, Head& head, RouterStep* routers,
                             bool all_tokens, Timer& timer) {
  const at::AutoDispatchBelowADInplaceOrView unrecorded;  // torch's autograd records nothing: cheaper calls
  PassReport report;
  const Decoder& decoder = learner.model.decoder;
  Arena& arena = learner.workspace.arena;
  StepKind kind = step_kind_of(learner.options, decoder.local().whole(), rollouts, routers && routers->took_counts());
  kind.whole_rollout = head.needs_whole_rollout();
  HeldState held = learner.held().state;
  held.beside_bytes = learner.workspace.held_beside(learner);
  {
    const TimedPart timed(timer, part::kPlan);
    report.plan = plan_step(decoder.local().last_stage(), learner.options, learner.machine, rollouts, all_tokens, kind,
                            held, learner.model.mesh);
  }
  if (learner.on_plan) learner.on_plan(report.plan);
  if (routers) {
    const TimedPart timed(timer, part::kCounting);
    routers->count_choices(report.plan, arena, learner.choices);
  }

  std::optional<SpillQueue> spill;
  if (const std::int64_t stored = report.plan.chosen.stored_bytes; stored > 0) {
    spill.emplace(store_of(arena.device(), learner.options.spill_dir), static_cast<int>(chunks_in_flight(stored)));
    spill->reserve(stored);
  }
  learner.gradients.zero();
  const ArenaScope scope(arena);
  StepPath path(decoder, report.plan, true, arena, learner.options.spill_dir);
  StepRun run{decoder, rollouts, *path, arena, &head, &learner.gradients, all_tokens};
  run.accounting = routers ? routers->accounting() : nullptr;
  run.choices = learner.choices;
  run.timer = learner.options.profile ? &timer : nullptr;
  run.spill = spill ? &*spill : nullptr;
  run.on_rows = [&](std::int64_t rows) {
    if (learner.on_share)
      learner.on_share(static_cast<double>(rows) / static_cast<double>(report.plan.physical_rows()));
  };
  const Mesh& mesh = learner.model.mesh;
  const auto log = learner.options.profile ? std::make_shared<TrafficLog>() : nullptr;
  mesh.record(log);
  const RunResult result = run_stage(run, report.plan);
  report.bytes = result.bytes;
  {
    const TimedPart timed(timer, part::kCommunication);
    const AxisBytes before = mesh.bytes();
    report.bytes.reduction.dp = learner.gradients.given_ahead();
    sum_over_ranks(learner.gradients, mesh);
    report.bytes.reduction += mesh.bytes() - before;
  }
  mesh.record(nullptr);

  report.trunk_rows = result.trunk_rows, report.wave_rows = result.wave_rows;
  report.trunk_forwards = result.trunk_forwards;
  report.seconds.phases = result.seconds;
  report.seconds.plan = timer.seconds(part::kPlan);
  report.seconds.counting = timer.seconds(part::kCounting);
  report.seconds.communication = timer.seconds(part::kCommunication);
  report.seconds.total = timer.total();
  if (log) {
    report.profile = profile_of(timer, report.seconds.total, report.plan, decoder.local(), kind, learner.machine);
    report.profile->collectives = {timer.began(), *log, result.last_backward_began, result.last_backward_ended};
  }
  report.arena_bytes = result.arena_bytes;
  report.peak_bytes = result.arena_bytes.above(decoder.device().held_bytes() - arena.touched());
  return joined(mesh, std::move(report));
}

AdamW::Update update_weights(Learner& learner) {
  ESPALIER_INTERNAL(learner.optimizer != nullptr, "an update without an optimizer");
  const Timer timer;
  AdamW::Update update = learner.optimizer->step(learner.gradients.flat());
  ++learner.model.updates;
  update.seconds = timer.total();
  return update;
}

void PassReport::add_update(const AdamW::Update& update) {
  seconds.optimizer = update.seconds;
  seconds.total += update.seconds;
  if (!profile) return;
  auto& parts = profile->seconds;
  parts.emplace(parts.end() - 1, part::kOptimizer, update.seconds);  // before the rest, which comes last
}

ForwardReport run_forward_pass(const ForwardPass& pass, Head& head) {
  const at::AutoDispatchBelowADInplaceOrView unrecorded;  // torch's autograd records nothing: cheaper calls
  const Timer timer;
  StepKind kind = forward_kind_of(pass.decoder.local().whole(), pass.rollouts);
  kind.all_rows_choose = pass.counts != nullptr;
  HeldState held = kWeightsOnly;
  held.beside_bytes = pass.workspace.held_beside(HeldModel{pass.decoder.local()}.bytes(pass.options.dtype));
  const StepPlan plan = plan_step(pass.decoder.local().last_stage(), pass.options, pass.machine, pass.rollouts, true,
                                  kind, held, pass.mesh);
  if (pass.on_plan) pass.on_plan(plan);
  const ArenaScope scope(pass.workspace.arena);
  StepPath path(pass.decoder, plan, false, pass.workspace.arena, pass.options.spill_dir);
  StepRun run{pass.decoder, pass.rollouts, *path, pass.workspace.arena, &head, nullptr, true};
  run.accounting = pass.counts;
  pass.progress.begin(pass.task, plan.physical_rows(), "rows");
  run.on_rows = [&](std::int64_t rows) { pass.progress.advance_to(rows); };
  const RunResult result = run_stage(run, plan);
  pass.progress.end();
  const double logical = sums_over_ranks(pass.mesh.dp, {static_cast<double>(plan.logical_rows)}).front();
  const double physical =
      sums_over_ranks(pass.mesh.replicas, {static_cast<double>(result.trunk_rows + result.wave_rows)}).front();
  return {std::llround(logical), std::llround(physical), timer.total()};
}

}  // namespace espalier
