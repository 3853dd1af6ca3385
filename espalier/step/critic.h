// PPO's critic: a decoder whose head gives one number per row, trained on the actor's rollouts through the same plans.
//
// Values are computed once, before the first update on the rollouts. Advantages and targets are computed from them
// (train/training_data.h). Then every mini-batch runs update() of the critic first, as in verl, and the actor's
// run_step second. Actor and critic take turns, so they share one workspace.
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "espalier/device/arena.h"
#include "espalier/metrics/progress.h"
#include "espalier/objective/value_loss.h"
#include "espalier/optimizer/adamw.h"
#include "espalier/state/trained_choice.h"
#include "espalier/step/mini_batch.h"
#include "espalier/step/pass.h"

namespace espalier {

struct CriticReport : PassReport {
  ValueLossParts loss = {};
  TokenSeries values = {};    // NaN for tokens without a requested value
  AdamW::Update update = {};  // set by update() only, like the next two
  std::int64_t step = 0;      // from 1
  double values_seconds = 0;  // spent in values_of since the previous update
};

class Critic {
 public:
  // `model` has a value head. --critic-lr is the learning rate; only the actor has router losses. `workspace` must
  // outlive the critic.
  Critic(std::unique_ptr<ModelState> model, const Options& options, const MachineProfile& machine,
         Workspace& workspace);

  // Values of all response tokens, masked ones included. Forward only; shared rows run once.
  TokenSeries values_of(std::span<const Rollout> rollouts, Progress& progress);

  // Overwrites gradients() with the gradient of the value loss: clipped around the rollouts' `values`, with the targets
  // mini_batch.targets.
  CriticReport compute_gradient(const MiniBatch& mini_batch, bool all_tokens);
  // compute_gradient and one AdamW update, clipped separately. `on_share` receives the fraction of rows that have run.
  CriticReport update(const MiniBatch& mini_batch, const std::function<void(double share)>& on_share = {});

  ModelState& model() { return *model_; }
  const GradientSet& gradients() const { return learner_.gradients; }
  Learner& learner() { return learner_; }
  AdamW& optimizer();  // created on first use

 private:
  std::unique_ptr<ModelState> model_;
  Learner learner_;
  std::optional<AdamW> optimizer_;
  double values_seconds_ = 0;  // spent in values_of since the last update
};

// The critic of --critic: a token classifier with one label, or the blocks of a language model under a new value head
// drawn from --seed (a note says so). Errors: as read_critic_shape and load_parameters; InputError if its vocabulary
// differs from the actor's.
std::unique_ptr<ModelState> load_critic(const CriticChoice& critic, const Options& options, const ModelShape& actor,
                                        Progress& progress, const Mesh& mesh = mesh_of_one());

// The result of values_of without a critic in training.
struct ScoredValues {
  TokenSeries values;
  ForwardReport report;
};
ScoredValues score_values(const ModelState& model, std::span<const Rollout> rollouts, const Options& options,
                          const MachineProfile& machine, Workspace& workspace, Progress& progress);

}  // namespace espalier
