#include "espalier/step/pass.h"

#include "espalier/base/mutation.h"
#include "espalier/observe/memory.h"
#include "espalier/ops/cpu/dispatch.h"
#include "espalier/phase/schedule.h"
#include "espalier/step/planning.h"

namespace espalier {

Learner::Learner(ModelState& model_state, const Options& run_options, const MachineProfile& machine_profile,
                 Arena& step_arena)
    : model(model_state),
      options(run_options),
      machine(machine_profile),
      gradients(model.table, model.shape, accumulator_type(scalar_type(model.dtype))),
      arena(step_arena) {}

std::int64_t Learner::held_bytes() const {
  const auto weights = static_cast<std::int64_t>(model.weights.nbytes());
  const auto sums = static_cast<std::int64_t>(gradients.flat().nbytes());
  const std::int64_t masters = weights == sums ? 0 : sums;
  return weights + sums + (has_optimizer ? 2 * sums + masters : 0);
}

void run_gradient_pass(Learner& learner, std::span<const Rollout> batch, Head& head, RouterStep* routers,
                       bool all_tokens, Timer& timer, PassReport& report) {
  const Decoder& decoder = learner.model.decoder;
  const StepKind kind{.optimizer = learner.has_optimizer,
                      .whole_rollout = head.needs_whole_rollout(),
                      .beside_bytes = learner.beside_bytes,
                      .all_routed = routers && routers->all_routed(),
                      .counting_pass = routers && routers->needs_counting_pass()};
  {
    const TimedPart timed(timer, part::kPlan);
    report.plan = plan_step(decoder.shape(), learner.options, learner.machine, batch, all_tokens, kind);
  }
  if (routers) {
    const TimedPart timed(timer, part::kCounting);
    routers->count_choices(report.plan, learner.arena, learner.choices);
  }

  if (!ESPALIER_MUTATION(gradients_not_zeroed)) learner.gradients.zero();
  const ArenaScope scope(learner.arena);
  KvPath path(decoder.shape(), report.plan.max_path_rows, decoder.dtype(), true, learner.arena);
  StepRun run{decoder, batch, path, learner.arena, &head, &learner.gradients, all_tokens};
  run.accounting = routers ? routers->accounting() : nullptr;
  run.choices = learner.choices;
  run.timer = learner.options.profile ? &timer : nullptr;
  run.on_rows = [&](std::int64_t rows) {
    if (learner.on_share)
      learner.on_share(static_cast<double>(rows) / static_cast<double>(report.plan.physical_rows()));
  };
  run_schedule(run, report.plan);

  report.trunk_rows = run.trunk_rows, report.wave_rows = run.wave_rows, report.trunk_forwards = run.trunk_forwards;
  report.seconds.phases = run.seconds;
  report.seconds.plan = timer.seconds(part::kPlan);
  report.seconds.counting = timer.seconds(part::kCounting);
  report.seconds.total = timer.total();
  if (run.timer)
    report.profile = profile_of(timer, report.seconds.total, report.plan, decoder.shape(), kind, learner.machine);
  report.arena_bytes = run.arena_bytes;
  report.peak_bytes = run.arena_bytes.above(resident_bytes() - learner.arena.touched());
}

ForwardReport run_forward_pass(const ForwardPass& pass, Head& head) {
  const Timer timer;
  const StepKind kind{
      .gradients = false, .optimizer = false, .beside_bytes = pass.beside_bytes, .all_routed = pass.counts != nullptr};
  const StepPlan plan = plan_step(pass.decoder.shape(), pass.options, pass.machine, pass.rollouts, true, kind);
  const ArenaScope scope(pass.arena);
  KvPath path(pass.decoder.shape(), plan.max_path_rows, pass.decoder.dtype(), false, pass.arena);
  StepRun run{pass.decoder, pass.rollouts, path, pass.arena, &head, nullptr, true};
  run.accounting = pass.counts;
  pass.progress.begin(pass.task, plan.physical_rows(), "rows");
  run.on_rows = [&](std::int64_t rows) { pass.progress.advance_to(rows); };
  run_schedule(run, plan);
  pass.progress.end();
  return {plan.logical_rows, run.trunk_rows + run.wave_rows, timer.total()};
}

}  // namespace espalier
