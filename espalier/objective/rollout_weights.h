// Importance weights for the mismatch between the policy that sampled and the old policy.
//
//   token:     w_t = c(exp(clamp(old_t - roll_t, -B, B)))
//   sequence:  w   = c(exp(clamp(sum over loss tokens of (old_t - roll_t), -B, B))), for every token
//   truncate:  c(x) = min(max(x, floor), threshold);  mask: c(x) = x inside [floor, threshold], 0 outside
//
// B is 20 unless --log-ratio-bound is given. The weights are constants of the step and multiply the policy loss only.
// docs/objectives.md (16), (17); verl 0.9, rollout_is; TRL 1.16, vllm_importance_sampling_mode.
#pragma once

#include "espalier/options/options.h"

namespace espalier {

struct RolloutWeights {
  RolloutCorrection level = RolloutCorrection::none;
  OutOfBounds beyond = OutOfBounds::truncate;
  double floor = 0, threshold = 2, bound = 20;

  static RolloutWeights from(const Options& options);
  // log_ratio: old - roll of the token, or its sum over the rollout's loss tokens.
  double weight(double log_ratio) const;
};

}  // namespace espalier
