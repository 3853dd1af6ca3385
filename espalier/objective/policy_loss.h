// Policy losses of one token, to be minimised, with their derivatives.
//
// lp is the current log-prob, old the old policy's, A the advantage, r = exp(clamp(lp - old, -B, B)), B = 20 unless
// --log-ratio-bound is given. At sequence level r = exp(min(mean of lp - old over the rollout's loss tokens, 10)),
// without the 10 if B is infinite. Equations: docs/objectives.md (9) to (15c). Names: verl 0.9, register_policy_loss;
// TRL 1.16's GRPOTrainer and prime-rl for losses that verl does not have. Derivatives equal torch.autograd's,
// also at kinks: clamp passes the gradient at its bounds, maximum and minimum of equal numbers give half of it to each.
#pragma once

#include <array>
#include <limits>

#include "espalier/options/options.h"
#include "espalier/rollout/rollout.h"

namespace espalier {

struct PolicySettings {
  PolicyLoss loss = PolicyLoss::vanilla;
  double ratio_low = 0.8, ratio_high = 1.2;                    // bounds of the clipped ratio
  double dual_clip = 3.0;                                      // --clip-ratio-c
  double ratio_cap = std::numeric_limits<double>::infinity();  // of the unclipped branch
  double log_ratio_bound = 20;                                 // B
  RatioLevel level = RatioLevel::token;
  double tau_positive = 1.0, tau_negative = 1.05;  // sapo, by the advantage's sign
  std::array<double, 4> vespo = {2, 3, 3, 2};      // k, lambda for A >= 0, then for A < 0
  double clip_low = 0.2, clip_high = 0.2;          // --clip-ratio-low, --clip-ratio-high: bounds of dppo_tv, dppo_kl
  double dppo_low = 0.2, dppo_high = 0.2, kl_tau = 1e-3, advantage_factor = 1;
  double icepop_low = 0.2, icepop_high = 5;

  bool by_sequence() const { return loss == PolicyLoss::gspo || level == RatioLevel::sequence; }
  // True if the rollout has one ratio, differentiated through its mean (TRL's importance_sampling_level): every token's
  // derivative is the mean over the rollout. False for verl's gspo, where each token's own log-prob has its own
  // gradient.
  bool shares_ratio() const {
    return level == RatioLevel::sequence && row_of(loss).sequence_ratio == SequenceRatio::mean;
  }
  bool compares_sampler() const { return row_of(loss).compares_sampler; }
  static PolicySettings from(const Options& options);
};

struct PolicyTerm {
  double value = 0;
  double gradient = 0;   // d value / d lp
  bool clipped = false;  // verl's pg_clipfrac: the clipped loss is the larger one (cispo: the ratio was clipped)
};

// Arguments of a token's term.
struct PolicyToken {
  double logprob = 0, old_logprob = 0, advantage = 0;  // old: for losses that compare the sampler, its log-prob
  // Over the rollout's loss tokens, for losses that need the whole rollout: the mean of lp - old; for vespo also the
  // sum of lp - old and of the logs of the tokens' importance weights, each clamped.
  double mean_log_ratio = 0, sum_log_ratio = 0;
  // The token's place, for losses and rules with data of their own in the record.
  const Rollout* rollout = nullptr;
  std::size_t position = 0;
};

// An importance ratio and its derivative with respect to the token's log-prob (0 beyond the bounds). At sequence level
// the value is detached and each token's own log-prob gets the gradient; for a sum over the rollout with equal weights
// this is the derivative through the mean.
struct Ratio {
  double value = 1, gradient = 1;
};
Ratio ratio_of(const PolicySettings& settings, const PolicyToken& token);

// The functions of policy_losses.def.
#define ESPALIER_POLICY_LOSS(name, ...) \
  PolicyTerm name##_term(const PolicySettings& settings, const PolicyToken& token);
#include "espalier/options/policy_losses.def"

// The loss chosen by `settings` at one token. Losses over a whole rollout use the rollout's value detached, and each
// token's own log-prob gets the gradient.
PolicyTerm policy_term(const PolicySettings& settings, const PolicyToken& token);

}  // namespace espalier
