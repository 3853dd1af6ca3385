#include "espalier/train/step.h"

#include "espalier/base/mutation.h"
#include "espalier/model/dispatch.h"
#include "espalier/observe/memory.h"
#include "espalier/observe/timer.h"
#include "espalier/phase/schedule.h"
#include "espalier/train/planning.h"

namespace espalier {

Actor::Actor(ModelState& model_state, const Options& run_options, const MachineProfile& machine_profile)
    : model(model_state),
      options(run_options),
      machine(machine_profile),
      gradients(model.table, model.shape, accumulator_type(scalar_type(model.dtype))),
      arena(arena_limit(run_options)) {}

GradientReport compute_gradient(Actor& actor, const MiniBatch& batch, bool all_logprobs) {
  Timer timer;
  GradientReport report;
  const Decoder& decoder = actor.model.decoder;
  Objective objective(batch.rollouts, batch.advantages, actor.options);
  const StepKind kind{true, actor.has_optimizer, objective.needs_whole_rollout()};
  {
    const TimedPart timed(timer, part::kPlan);
    report.plan = plan_step(actor.model.shape, actor.options, actor.machine, batch.rollouts, all_logprobs, kind);
  }
  RouterStep routers(decoder, batch.rollouts, actor.options);
  routers.count_choices(report.plan, actor.arena);

  if (!ESPALIER_MUTATION(gradients_not_zeroed)) actor.gradients.zero();
  const ArenaScope scope(actor.arena);
  KvPath path(actor.model.shape, report.plan.max_path_rows, decoder.dtype(), true, actor.arena);
  StepRun run{decoder, batch.rollouts, path, actor.arena, &objective, &actor.gradients, all_logprobs};
  run.accounting = routers.accounting();
  run.timer = actor.options.profile ? &timer : nullptr;
  run.on_rows = [&](std::int64_t rows) {
    if (actor.on_share) actor.on_share(static_cast<double>(rows) / static_cast<double>(report.plan.physical_rows()));
  };
  run_schedule(run, report.plan);

  report.loss = objective.parts();
  report.router = routers.report();
  report.loss.loss += report.router.weighted_loss;
  report.trunk_rows = run.trunk_rows, report.wave_rows = run.wave_rows, report.trunk_forwards = run.trunk_forwards;
  report.series = std::move(run.series);
  report.seconds.phases = run.seconds;
  report.seconds.plan = timer.seconds(part::kPlan);
  report.seconds.counting = report.router.counting_seconds;
  report.seconds.total = timer.total();
  if (run.timer)
    report.profile = profile_of(timer, report.seconds.total, report.plan, actor.model.shape, actor.machine);
  report.arena_bytes = run.arena_bytes;
  report.peak_bytes = run.arena_bytes.above(resident_bytes() - actor.arena.touched());
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
