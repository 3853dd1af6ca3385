#include "espalier/train/pair_training.h"

#include <algorithm>

namespace espalier {

bool PairTraining::needs_reference(std::span<const Rollout> rollouts) const {
  return !options_.reference_free &&
         !std::ranges::all_of(rollouts, [](const Rollout& rollout) { return rollout.pair.ref_logprob.has_value(); });
}

void PairTraining::take_reference(std::span<const Rollout> rollouts, const LogprobFunction& logprobs_of) {
  TokenSeries series;
  if (needs_reference(rollouts)) series = logprobs_of(rollouts);
  reference_.assign(rollouts.size(), 0);
  for (std::size_t i = 0; i < rollouts.size(); ++i) {
    const Rollout& rollout = rollouts[i];
    double& reference = reference_.at(static_cast<std::size_t>(rollout.index));
    if (rollout.pair.ref_logprob)
      reference = *rollout.pair.ref_logprob;
    else if (!series.empty())
      reference = sum_of_answer(rollout, series[i]);
  }
}

LinearPairs PairTraining::linear(const MiniBatch& mini_batch, const LogprobFunction& logprobs_of) const {
  std::vector<double> reference;
  for (const Rollout& rollout : mini_batch.rollouts)
    reference.push_back(reference_.at(static_cast<std::size_t>(rollout.index)));
  return linear_pairs(mini_batch.rollouts, logprobs_of(mini_batch.rollouts), reference, options_);
}

}  // namespace espalier
