// One optimizer step: rollouts -> prefix trees -> plan -> schedule -> gradients -> AdamW (docs/architecture.md).
#pragma once

#include <functional>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "espalier/execute/language_head.h"
#include "espalier/objective/objective.h"
#include "espalier/optimizer/adamw.h"
#include "espalier/step/critic.h"
#include "espalier/step/mini_batch.h"
#include "espalier/step/pass.h"

namespace espalier {

struct OwnWorkspace {
  explicit OwnWorkspace(std::int64_t arena_limit) : own(arena_limit) {}
  Workspace own;
};

// A learner with a workspace of its own.
struct Actor : private OwnWorkspace, Learner {
  Actor(ModelState& model_state, const Options& run_options, const MachineProfile& machine_profile,
        AdamW* its_optimizer = nullptr);

  const ScoredChoices* scored = nullptr;  // routers' choices counted in a score pass; may be null
};

struct GradientReport : PassReport {
  LossParts loss = {};  // `loss` includes the router losses
  RouterReport router = {};
  std::vector<RolloutSeries> series = {};  // per rollout of the mini-batch
};

struct StepReport {
  std::int64_t step = 0;  // from 1
  GradientReport gradient;
  AdamW::Update update;
  std::optional<double> reward;                       // mean over the rollouts with a reward
  std::optional<CriticReport> critic;                 // report of the critic's update, which runs before the actor's
  std::vector<std::pair<std::string, double>> means;  // for objectives over pairs and sets, with TRL's names
};

// Overwrites actor.gradients with the gradient of the mini-batch's loss. `all_logprobs`: also masked tokens' log-probs.
GradientReport compute_gradient(Actor& actor, const MiniBatch& mini_batch, bool all_logprobs);

// One update. A critic (null: none) is updated first, as in verl: its values and targets are from before both updates.
// `all_logprobs`: also log-probs of masked tokens, at the weights before the update, which stays bitwise identical.
// `on_share` receives the fraction of the step's rows that have run, the critic's first; may be empty.
StepReport run_step(Actor& actor, const MiniBatch& mini_batch, bool all_logprobs, Critic* critic = nullptr,
                    const std::function<void(double share)>& on_share = {});

}  // namespace espalier
