#include "espalier/step/step.h"

#include "espalier/step/over_ranks.h"
#include "espalier/step/planning.h"

namespace espalier {

Actor::Actor(ModelState& model_state, const Options& run_options, const MachineProfile& machine_profile,
             AdamW* its_optimizer)
    : OwnWorkspace(arena_limit(run_options)), Learner(model_state, run_options, machine_profile, own, its_optimizer) {}

GradientReport compute_gradient(Actor& actor, const MiniBatch& mini_batch, bool all_logprobs) {
  Timer timer;
  Objective objective(mini_batch.rollouts, mini_batch.advantages, actor.options);
  RouterStep routers(actor.model, mini_batch.rollouts, actor.options, actor.scored);
  LanguageHead head(actor.model.decoder, mini_batch.rollouts, actor.workspace.arena, &objective, &actor.gradients);
  GradientReport report{run_gradient_pass(actor, mini_batch.rollouts, head, &routers, all_logprobs, timer)};
  report.loss = objective.parts();
  report.series = std::move(head.series());
  add_over_ranks(actor.model.mesh, report.loss);
  gather_series(actor.model.mesh, report.series);
  report.router = routers.report();
  report.loss.loss += report.router.weighted_loss;
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

StepReport run_step(Actor& actor, const MiniBatch& mini_batch, bool all_logprobs, Critic* critic,
                    const std::function<void(double share)>& on_share) {
  StepReport report;
  report.reward = mean_reward(mini_batch.rollouts);
  const double before = critic ? 0.5 : 0;  // of the step's rows
  if (on_share) actor.on_share = [&](double share) { on_share(before + share * (1 - before)); };
  if (critic)
    report.critic = critic->update(mini_batch, [&](double share) {
      if (on_share) on_share(before * share);
    });
  report.gradient = compute_gradient(actor, mini_batch, all_logprobs);
  if (on_share) actor.on_share = {};
  report.update = update_weights(actor);
  report.gradient.add_update(report.update);
  report.step = actor.optimizer->steps_done();
  return report;
}

}  // namespace espalier
