#include "espalier/step/step.h"

#include <algorithm>
#include <cmath>
#include <optional>

#include "espalier/rollout/trajectories.h"
#include "espalier/state/planning.h"
#include "espalier/step/over_ranks.h"

namespace espalier {

Actor::Actor(ModelState& model_state, const Options& run_options, const MachineProfile& machine_profile,
             AdamW* its_optimizer)
    : OwnWorkspace(budget_of(run_options).beside_held()),
      Learner(model_state, run_options, machine_profile, own, its_optimizer) {}

namespace {

std::optional<double> mean_reward(std::span<const Rollout> rollouts) {
  double sum = 0;
  std::int64_t count = 0;
  for (const std::optional<double>& reward : rewards_of(rollouts, trajectories_of(rollouts)))
    if (reward) sum += *reward, ++count;
  return count > 0 ? std::optional(sum / static_cast<double>(count)) : std::nullopt;
}

// Log-probs and entropies of all response tokens at the weights of the step, on every rank.
std::vector<RolloutSeries> score_all(Actor& actor, std::span<const Rollout> rollouts) {
  NoProgress silent;
  LanguageHead head(actor.model.decoder, rollouts, actor.workspace.arena);
  run_forward_pass({.decoder = actor.model.decoder,
                    .rollouts = rollouts,
                    .options = actor.options,
                    .machine = actor.machine,
                    .workspace = actor.workspace,
                    .progress = silent,
                    .task = "log-probs",
                    .mesh = actor.model.mesh},
                   head);
  gather_series(actor.model.mesh, head.series());
  return std::move(head.series());
}

// Masked tokens' log-probs and entropies, by a forward of their own at the same weights: what a caller wants to read
// must not change which rows the gradient's products have, and with them its last bits.
void score_masked(Actor& actor, std::span<const Rollout> rollouts, std::vector<RolloutSeries>& series) {
  const auto masked = [](const Rollout& rollout) {
    return std::ranges::find(rollout.loss_mask, 0) != rollout.loss_mask.end();
  };
  if (std::ranges::none_of(rollouts, masked)) return;
  const std::vector<RolloutSeries> scored = score_all(actor, rollouts);
  for (std::size_t i = 0; i < rollouts.size(); ++i)
    for (std::size_t t = 0; t < rollouts[i].loss_mask.size(); ++t)
      if (rollouts[i].loss_mask[t] == 0) {
        series[i].logprob[t] = scored[i].logprob[t];
        series[i].entropy[t] = scored[i].entropy[t];
      }
}

}  // namespace

GradientReport compute_gradient(Actor& actor, const MiniBatch& mini_batch, bool all_logprobs) {
  Timer timer;
  Objective objective(mini_batch.rollouts, mini_batch.advantages, actor.options);
  if (objective.needs_sequences()) {
    TokenSeries logprobs;
    for (RolloutSeries& series : score_all(actor, mini_batch.rollouts)) logprobs.push_back(std::move(series.logprob));
    objective.settle_sequences(logprobs);
  }
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
  report.gradient = compute_gradient(actor, mini_batch, false);
  if (all_logprobs) score_masked(actor, mini_batch.rollouts, report.gradient.series);
  if (on_share) actor.on_share = {};
  report.update = update_weights(actor);
  report.gradient.add_update(report.update);
  report.step = actor.optimizer->steps_done();
  return report;
}

}  // namespace espalier
