// Rules for the policy loss of a token: the functions of the rows of token_rules.def.
#pragma once

#include <array>
#include <vector>

#include "espalier/objective/policy_loss.h"
#include "espalier/options/options.h"
#include "espalier/options/token_rules.h"

namespace espalier {

// Constants in the losses of a sequence's tokens that follow from its own log-probs. Means and sums are over its loss
// tokens, each counted by its share.
struct SequenceConstants {
  double mean_log_ratio = 0;  // of lp - old
  double sum_log_ratio = 0;   // of lp - old and the log of the token's weight, each clamped (vespo)
  double sampler_weight = 1;  // --rollout-is sequence; seq-mask-tis: 1 for a kept sequence, else 0
  double kl_gradient = 0;     // of k3_unbiased by the sequence's ratio: mean of the weighted KL
  double ratio_gradient = 0;  // of the policy loss, where the sequence's tokens share one ratio: mean of the weighted
  bool off_policy = false;    // --off-policy-threshold
};

// A token's part of the policy loss: factor * term(token). Rules change the factor, or the token's advantage.
struct TokenPart {
  PolicyToken token;
  double factor = 1;
};

// Every function returns the number that the row's metric is the mean of.
#define ESPALIER_TOKEN_RULE(name, option, condition, sees, ratio, changes, metric) \
  double name##_rule(const Options& options, const SequenceConstants& sequence, TokenPart& part);
#include "espalier/options/token_rules.def"

// The rules that hold under some options.
class TokenRules {
 public:
  using Reports = std::array<double, kTokenRules>;

  explicit TokenRules(const Options& options);
  // A token whose factor becomes 0 is left to no further rule. `reports` (may be null): overwrites the entries of the
  // rules that were asked.
  void apply(const SequenceConstants& sequence, TokenPart& part, Reports* reports = nullptr) const;
  bool holds(std::size_t rule) const;

 private:
  Options options_;
  std::vector<std::size_t> held_;
};

}  // namespace espalier
