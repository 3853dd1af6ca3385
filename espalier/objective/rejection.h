// Rejection of tokens and sequences whose log-probs differ too much between old policy and sampler (--rollout-rs), by
// verl's words:
//
//   d = clamp(old - roll, -20, 20); k1 = -d, k2 = d^2 / 2, k3 = exp(d) - 1 - d
//   token_kN, seq_sum_kN, seq_mean_kN, seq_max_kN: the number of the token; the sum, mean or maximum over a sequence
//
// A word rejects what lies above its threshold; a word of k1 what lies outside [log low, log high]. A token is kept if
// every word keeps it. A rejected token has no loss and leaves every divisor, but groups and rewards stay as they are.
// docs/objectives.md (17b); verl 0.9.1, rollout_corr_helper.py.
#pragma once

#include <span>
#include <string>
#include <vector>

#include "espalier/options/options.h"
#include "espalier/rollout/rollout.h"

namespace espalier {

enum class Divergence { k1, k2, k3 };
enum class DivergenceOver { token, sum, mean, maximum };

struct RejectionRule {
  std::string word;
  Divergence divergence = Divergence::k1;
  DivergenceOver over = DivergenceOver::token;
  double low = 0, high = 0;  // of the number; low only of k1

  bool keeps(double number) const { return number <= high && (divergence != Divergence::k1 || number >= low); }
};

// The rules of --rollout-rs and --rollout-rs-threshold, each word once. Errors: OptionError.
std::vector<RejectionRule> rejection_rules(const Options& options);

// Masks the rejected tokens of a file or of the records of one step. Returns a note for the user; "" without rules.
// Errors: InputError for a record without old_logprobs or rollout_logprobs.
std::string reject_tokens(std::span<Rollout> rollouts, const Options& options);

}  // namespace espalier
