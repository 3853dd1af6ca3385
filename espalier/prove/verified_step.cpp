#include "espalier/prove/verified_step.h"

#include <ATen/core/Tensor.h>

#include <utility>

namespace espalier {

StepOutcome VerifiedStep::outcome(PassReport& report, double loss) {
  const at::Tensor gradient = learner().model.decoder.device().to_host(learner().gradients.flat());
  return {gradient.to(at::kDouble, false, true), {}, loss, std::move(report.plan)};
}

StepOutcome ActorStep::run(const MiniBatch& mini_batch, const Options& options) {
  actor_.options = options;
  GradientReport report = compute_gradient(actor_, mini_batch, true);
  StepOutcome out = outcome(report, report.loss.loss);
  out.series.resize(2);
  for (RolloutSeries& series : report.series) {
    out.series[0].push_back(std::move(series.logprob));
    out.series[1].push_back(std::move(series.entropy));
  }
  return out;
}

std::vector<TokenSeries> ActorStep::slopes(const MiniBatch& mini_batch, const Options& options,
                                           const StepOutcome& at) const {
  Objective objective(mini_batch.rollouts, mini_batch.advantages, options);
  std::vector<TokenSeries> slopes = at.series;
  for (std::size_t i = 0; i < mini_batch.rollouts.size(); ++i)
    objective.add_rollout(static_cast<std::int32_t>(i), at.series[0][i], at.series[1][i], slopes[0][i], slopes[1][i]);
  return slopes;
}

StepOutcome RewardStep::run(const MiniBatch& mini_batch, const Options& options) {
  actor_.options = options;
  RewardGradient gradient = compute_reward_gradient(actor_, mini_batch);
  StepOutcome out = outcome(gradient, gradient.loss.means.loss);
  out.series.emplace_back();
  for (const double score : gradient.scores) out.series[0].push_back({score});
  return out;
}

std::vector<TokenSeries> RewardStep::slopes(const MiniBatch& mini_batch, const Options& options,
                                            const StepOutcome& at) const {
  std::vector<double> scores;
  for (const std::vector<double>& score : at.series[0]) scores.push_back(score[0]);
  std::vector<TokenSeries> slopes(1);
  for (const double slope : score_loss(mini_batch.rollouts, scores, options).slope) slopes[0].push_back({slope});
  return slopes;
}

StepOutcome CriticStep::run(const MiniBatch& mini_batch, const Options& options) {
  critic_.learner().options = options;
  CriticReport report = critic_.compute_gradient(mini_batch, true);
  StepOutcome out = outcome(report, report.loss.loss);
  out.series.push_back(std::move(report.values));
  return out;
}

std::vector<TokenSeries> CriticStep::slopes(const MiniBatch& mini_batch, const Options& options,
                                            const StepOutcome& at) const {
  ValueObjective objective(mini_batch.rollouts, mini_batch.targets, options);
  std::vector<TokenSeries> slopes = at.series;
  for (std::size_t i = 0; i < slopes[0].size(); ++i)
    for (std::size_t t = 0; t < slopes[0][i].size(); ++t)
      slopes[0][i][t] =
          objective.add_token(static_cast<std::int32_t>(i), static_cast<std::int32_t>(t), at.series[0][i][t]);
  return slopes;
}

}  // namespace espalier
