#include "espalier/step/reward_step.h"

#include <utility>

#include "espalier/base/error.h"
#include "espalier/execute/critic_head.h"

namespace espalier {
namespace {

std::vector<double> scores_of(Actor& actor, std::span<const Rollout> rollouts) {
  NoProgress silent;  // a part of the step
  const ScoredValues scored =
      score_values(actor.model, rollouts, actor.options, actor.machine, actor.workspace, silent);
  std::vector<double> scores;
  for (const std::vector<double>& values : scored.values) scores.push_back(values.back());
  return scores;
}

}  // namespace

RewardGradient compute_reward_gradient(Actor& actor, const MiniBatch& mini_batch) {
  ESPALIER_INTERNAL(actor.model.shape.value_head, actor.model.shape.architecture, " without a value head");
  Timer timer;
  std::vector<double> scores = scores_of(actor, mini_batch.rollouts);
  ScoreLoss loss = score_loss(mini_batch.rollouts, scores, actor.options);
  ScoreSlopes slopes(loss.slope);
  CriticHead head(actor.model.decoder, mini_batch.rollouts, &slopes, &actor.gradients);
  PassReport pass = run_gradient_pass(actor, mini_batch.rollouts, head, nullptr, false, timer);
  return {std::move(pass), std::move(scores), std::move(loss)};
}

StepReport run_reward_step(Actor& actor, const MiniBatch& mini_batch,
                           const std::function<void(double share)>& on_share) {
  actor.on_share = on_share;
  RewardGradient gradient = compute_reward_gradient(actor, mini_batch);
  actor.on_share = {};
  const ScoreMeans means = gradient.loss.means;
  StepReport report;
  report.gradient = {std::move(gradient)};
  report.gradient.loss.loss = report.gradient.loss.pg_loss = means.loss;
  report.gradient.loss.loss_tokens = static_cast<std::int64_t>(mini_batch.rollouts.size());
  report.means = {{"accuracy", means.accuracy},
                  {"margin", means.margin},
                  {"min_reward", means.least},
                  {"mean_reward", means.mean},
                  {"max_reward", means.most}};
  report.update = update_weights(actor);
  report.gradient.add_update(report.update);
  report.step = actor.optimizer->steps_done();
  return report;
}

}  // namespace espalier
