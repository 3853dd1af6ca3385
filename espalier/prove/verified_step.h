// The step that `verify` repeats: of the actor or of the critic, under several plans.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include "espalier/step/critic.h"
#include "espalier/step/reward_step.h"
#include "espalier/step/step.h"

namespace espalier {

// The result of one run, copied out of the learner, in double and in the order of the file.
struct StepOutcome {
  at::Tensor gradient;              // flat
  std::vector<TokenSeries> series;  // the variables of the loss: log-probs and entropies, or values
  double loss = 0;
  StepPlan plan;
};

// A step that is verified: the actor's, a reward model's or the critic's.
class VerifiedStep {
 public:
  virtual ~VerifiedStep() = default;
  virtual Learner& learner() = 0;
  // Overwrites the learner's options and gradients.
  virtual StepOutcome run(const MiniBatch& mini_batch, const Options& options) = 0;
  // dL/d(series) at the outcome `at`.
  virtual std::vector<TokenSeries> slopes(const MiniBatch& mini_batch, const Options& options,
                                          const StepOutcome& at) const = 0;

 protected:
  StepOutcome outcome(PassReport& report, double loss);  // without its series
};

class ActorStep : public VerifiedStep {
 public:
  explicit ActorStep(Actor& actor) : actor_(actor) {}
  Learner& learner() override { return actor_; }
  StepOutcome run(const MiniBatch& mini_batch, const Options& options) override;
  std::vector<TokenSeries> slopes(const MiniBatch& mini_batch, const Options& options,
                                  const StepOutcome& at) const override;

 private:
  Actor& actor_;
};

// For a reward model; its series are one score per rollout.
class RewardStep : public VerifiedStep {
 public:
  explicit RewardStep(Actor& actor) : actor_(actor) {}
  Learner& learner() override { return actor_; }
  StepOutcome run(const MiniBatch& mini_batch, const Options& options) override;
  std::vector<TokenSeries> slopes(const MiniBatch& mini_batch, const Options& options,
                                  const StepOutcome& at) const override;

 private:
  Actor& actor_;
};

class CriticStep : public VerifiedStep {
 public:
  explicit CriticStep(Critic& critic) : critic_(critic) {}
  Learner& learner() override { return critic_.learner(); }
  StepOutcome run(const MiniBatch& mini_batch, const Options& options) override;
  std::vector<TokenSeries> slopes(const MiniBatch& mini_batch, const Options& options,
                                  const StepOutcome& at) const override;

 private:
  Critic& critic_;
};

}  // namespace espalier
