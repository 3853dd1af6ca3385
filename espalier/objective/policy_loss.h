// Policy losses of one token, to be minimised, with their derivatives.
//
// lp current log-prob, old the old policy's, A advantage, r = exp(clamp(lp - old, -20, 20)).
// Equations: docs/objectives.md (9) to (15). Meaning of the names: verl 0.9, register_policy_loss.
// Derivatives are those of torch.autograd on verl's formulas, kinks included: clamp passes the gradient at its bounds,
// maximum and minimum of equal numbers give half of it to each.
#pragma once

#include "espalier/options/options.h"

namespace espalier {

struct PolicySettings {
  PolicyLoss loss = PolicyLoss::vanilla;
  double ratio_low = 0.8, ratio_high = 1.2;  // where the ratio is clipped
  double dual_clip = 3.0;                    // --clip-ratio-c

  static PolicySettings from(const Options& options);
};

struct PolicyTerm {
  double value = 0;
  double gradient = 0;   // d value / d lp
  bool clipped = false;  // verl's pg_clipfrac: the clipped loss is the larger one (cispo: the ratio was clipped)
};

// What a token's term is a function of.
struct PolicyToken {
  double logprob = 0, old_logprob = 0, advantage = 0;
  // Of the rollout's loss tokens: the mean of lp - old, for losses that need the whole rollout.
  double mean_log_ratio = 0;
};

// The loss that `settings` names, at one token. Losses of a whole rollout take their rollout's value detached, and each
// token's own log-prob carries the gradient.
PolicyTerm policy_term(const PolicySettings& settings, const PolicyToken& token);

}  // namespace espalier
