// Metrics of each rollout of a step (--rollout-metrics): one line a rollout and step, JSON Lines, or CSV where
// the name ends in ".csv".
//
// | step, index, id, group          | which: `index` counts over the whole input from 0
// | reward, advantage               | as recorded; mean over loss tokens of the advantage that was used
// | loss                            | what the rollout adds to the step's loss; these sum to it (router losses apart)
// | ratio, ratio_max, clip_fraction | exp(log p - old log p): mean and largest over loss tokens; share of them clipped
// | old_kl                          | mean of old log p - log p: the distance from the policy that sampled
// | kl                              | mean of k3 to ref_logprobs, docs/objectives.md (29); empty without them
// | entropy, logprob                | means over loss tokens
// | tokens, loss_tokens             | tokens of the response; those with a loss
// | metrics of token_rules.def      | of the rules that hold: their means over loss tokens
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>

#include "espalier/base/atomic_file.h"
#include "espalier/data/training_data.h"
#include "espalier/execute/language_head.h"
#include "espalier/options/options.h"

namespace espalier {

class RolloutMetrics {
 public:
  // Errors: OptionError where the file cannot be written.
  RolloutMetrics(const std::string& path, const Options& options);

  // `series`: of the mini-batch's rollouts, at the weights that the step's loss was computed with.
  void add(std::int64_t step, const MiniBatch& mini_batch, std::span<const RolloutSeries> series);
  void finish();  // without it the file is as it was

 private:
  Options options_;
  bool csv_;
  AtomicFile file_;
};

}  // namespace espalier
