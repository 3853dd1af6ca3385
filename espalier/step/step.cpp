#include "espalier/step/step.h"

#include "espalier/step/planning.h"

namespace espalier {

// The base binds the arena before it exists and does not touch it.
Actor::Actor(ModelState& model_state, const Options& run_options, const MachineProfile& machine_profile)
    : Learner(model_state, run_options, machine_profile, own_arena), own_arena(arena_limit(run_options)) {}

GradientReport compute_gradient(Actor& actor, const MiniBatch& batch, bool all_logprobs) {
  Timer timer;
  GradientReport report;
  Objective objective(batch.rollouts, batch.advantages, actor.options);
  RouterStep routers(actor.model, batch.rollouts, actor.options, actor.scored);
  LanguageHead head(actor.model.decoder, batch.rollouts, actor.arena, &objective, &actor.gradients);
  run_gradient_pass(actor, batch.rollouts, head, &routers, all_logprobs, timer, report);
  report.loss = objective.parts();
  report.router = routers.report();
  report.loss.loss += report.router.weighted_loss;
  report.series = std::move(head.series());
  return report;
}

namespace {

std::optional<double> mean_reward(std::span<const Rollout> rollouts) {
  double sum = 0;
  std::int64_t count = 0;
  for (const Rollout& rollout : rollouts)
    if (rollout.reward) sum += *rollout.reward, ++count;
  return count > 0 ? std::optional(sum / static_cast<double>(count)) : std::nullopt;
}

}  // namespace

StepReport run_step(Actor& actor, AdamW& optimizer, const MiniBatch& batch, bool all_logprobs) {
  StepReport report;
  actor.has_optimizer = true;
  report.reward = mean_reward(batch.rollouts);
  report.gradient = compute_gradient(actor, batch, all_logprobs);
  GradientReport& gradient = report.gradient;
  const Timer timer;
  report.update = optimizer.step(actor.gradients.flat());
  ++actor.model.updates;
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
