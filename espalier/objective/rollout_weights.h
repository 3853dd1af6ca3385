// Importance weights for the mismatch between the policy that sampled and the old policy.
//
//   token:     w_t = c(exp(clamp(old_t - roll_t, -B, B)))
//   sequence:  w   = c(exp(clamp(sum over loss tokens of (old_t - roll_t), -B, B))), for every token
//   truncate:  c(x) = min(max(x, floor), threshold);  mask: c(x) = x inside [floor, threshold], 0 outside
//   seq-mask-tis: w_t = exp(old_t - roll_t) if floor <= exp(mean over loss tokens of (old - roll)) <= threshold, else 0
//
// B is 20 unless --log-ratio-bound is given. The weights are constants of the step and multiply the policy loss only.
// docs/objectives.md (16) to (17a); verl 0.9, rollout_is; TRL 1.16, vllm_importance_sampling_mode; NeMo-RL,
// truncated_importance_sampling_type.
#pragma once

#include "espalier/options/options.h"

namespace espalier {

struct RolloutWeights {
  RolloutCorrection level = RolloutCorrection::none;
  OutOfBounds beyond = OutOfBounds::truncate;
  double floor = 0, threshold = 2, bound = 20;

  static RolloutWeights from(const Options& options);
  // The weight depends on the log-ratios of the whole sequence.
  bool by_sequence() const { return level == RolloutCorrection::sequence || level == RolloutCorrection::seq_mask_tis; }
  // log_ratio: old - roll of the token, or its sum over the sequence's loss tokens.
  double weight(double log_ratio) const;
  // seq-mask-tis: whether a sequence is kept, and the weight of a token of a kept one. As in NeMo-RL, a weight beyond
  // the largest number is 0.
  bool keeps(double mean_log_ratio) const;
  double unclipped_weight(double log_ratio) const;
};

}  // namespace espalier
