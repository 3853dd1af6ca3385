// --objective dpo over recorded pairs. The derivative of a pair needs all log-probs of both answers, so every
// mini-batch runs forward once before its update; prompts are shared in that pass too. Afterwards the loss is linear
// (objective/pair_loss.h) and the update is an ordinary one: the plan may split a pair over waves.
#pragma once

#include <functional>
#include <span>
#include <vector>

#include "espalier/objective/pair_loss.h"
#include "espalier/step/mini_batch.h"

namespace espalier {

// Log-probs of all response tokens under some weights, one series per rollout.
using LogprobFunction = std::function<TokenSeries(std::span<const Rollout>)>;

class PairTraining {
 public:
  explicit PairTraining(const Options& options) : options_(options) {}

  // True if some record has no ref_..._logps, unless the loss has no reference (--reference-free).
  bool needs_reference(std::span<const Rollout> rollouts) const;
  // Keeps the reference log-prob of every rollout: as recorded, else from `logprobs_of`, which may be empty if
  // needs_reference is false. `rollouts`: all of the run.
  void take_reference(std::span<const Rollout> rollouts, const LogprobFunction& logprobs_of);

  // The loss of the mini-batch around the weights of `logprobs_of`. Errors: as linear_pairs.
  LinearPairs linear(const MiniBatch& mini_batch, const LogprobFunction& logprobs_of) const;

 private:
  const Options& options_;
  std::vector<double> reference_;  // by Rollout::index
};

}  // namespace espalier
