// One update of a reward model (--objective reward). The derivative of a set needs the scores of all its answers, so a
// mini-batch runs forward once before its update. Then every answer has one weight, dL / dr, and the plan may split a
// set over waves and ranks. Prompts are shared in both passes.
#pragma once

#include <functional>
#include <vector>

#include "espalier/objective/score_loss.h"
#include "espalier/step/step.h"

namespace espalier {

struct RewardGradient : PassReport {
  std::vector<double> scores;  // one per rollout
  ScoreLoss loss;
};

// Overwrites actor.gradients. The model must have a value head; end_with_scores must have changed the rollouts.
RewardGradient compute_reward_gradient(Actor& actor, const MiniBatch& mini_batch);

// Computes the gradient and runs one update. `means` of the report has TRL's names.
StepReport run_reward_step(Actor& actor, const MiniBatch& mini_batch,
                           const std::function<void(double share)>& on_share);

}  // namespace espalier
