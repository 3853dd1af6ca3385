// Truncated importance weights for the mismatch between the policy that sampled and the old policy.
//
//   token:     w_t = min(exp(clamp(old_t - roll_t, -20, 20)), threshold)
//   sequence:  w   = min(exp(clamp(sum over loss tokens of (old_t - roll_t), -20, 20)), threshold), for every token
//
// Constants of the step, they multiply the policy loss only. docs/objectives.md (16), (17); verl 0.9, rollout_is.
#pragma once

namespace espalier {

// log_ratio: old - roll of the token, or its sum over the rollout's loss tokens.
double truncated_weight(double log_ratio, double threshold);

}  // namespace espalier
