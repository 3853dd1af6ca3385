// --objective dpo: the loss of a pair of answers, and its derivative.
//
//   d = (S_c - s_c) - (S_r - s_r),   L = mean over pairs of l(d)
//   sigmoid  l = -(1 - e) log sigmoid(beta d) - e log sigmoid(-beta d)
//   robust   l = (-(1 - e) log sigmoid(beta d) + e log sigmoid(-beta d)) / (1 - 2 e)
//   hinge    l = max(0, 1 - beta d)
//   ipo      l = (d' - 1 / (2 beta))^2,   d' is d with means over the tokens of an answer instead of sums
//
// S is the sum of log-probs over the loss tokens of the chosen (c) or rejected (r) answer, s the same sum under the
// reference (0 with --reference-free), e is --label-smoothing. Source: TRL 1.16, DPOTrainer; sigmoid with smoothing is
// conservative DPO. Tables: docs/pairs.md.
#pragma once

#include <span>
#include <vector>

#include "espalier/options/options.h"
#include "espalier/rollout/rollout.h"

namespace espalier {

// A number for each of the two answers.
struct OfAnswers {
  double chosen = 0, rejected = 0;
};

struct PairTerm {
  double loss = 0;
  OfAnswers gradient;  // dl / dS
};

// `policy` and `reference`: S and s; `tokens`: numbers of loss tokens.
PairTerm pair_term(const Options& options, const OfAnswers& policy, const OfAnswers& reference,
                   const OfAnswers& tokens);

// Means over the pairs of a mini-batch. Rewards are beta (S - s).
struct PairMeans {
  double loss = 0, margin = 0, accuracy = 0;  // accuracy: share of pairs whose chosen answer has the larger reward
  OfAnswers reward, logprob;
};

// The loss of a mini-batch, linearised at the log-probs of the current weights: every response token of rollout i has
// the advantage A = -dL / dS_i, so that -sum A log p over loss tokens has the gradient of L.
struct LinearPairs {
  std::vector<std::vector<double>> advantages;  // one series per rollout
  PairMeans means;
};

// `logprobs`: of all response tokens, one series per rollout; `reference`: s of every rollout. Errors: InputError for a
// rollout that belongs to no pair.
LinearPairs linear_pairs(std::span<const Rollout> rollouts, std::span<const std::vector<double>> logprobs,
                         std::span<const double> reference, const Options& options);

// Sum of the log-probs over the loss tokens.
double sum_of_answer(const Rollout& rollout, std::span<const double> logprobs);

}  // namespace espalier
