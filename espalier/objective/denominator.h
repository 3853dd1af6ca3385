// Weight of one loss token in the mini-batch's loss: every aggregation is a plain weighted sum over loss tokens,
// agg(x) = sum_i w_i sum_t m_it x_it, with weights that are known before the first wave. How the rollouts are cut into
// waves therefore changes nothing. Equations: docs/objectives.md (20) to (24).
// i rollout, t response token, m loss mask, n_i = sum_t m_it, N = sum_i n_i, B rollouts of the mini-batch.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "espalier/options/options.h"
#include "espalier/rollout/rollout.h"

namespace espalier {

// Aggregation of the critic's loss: --loss-agg-mode, by default token-mean for every policy loss.
Aggregation value_aggregation(const Options& options);

std::int64_t count_loss_tokens(const Rollout& rollout);

// Sums over the whole mini-batch that a loss needs, counted from its records before the first row runs. Every rank
// reads all records, so every rank has the same sums; computed values never enter a denominator.
struct MiniBatchTotals {
  std::int64_t rollouts = 0, loss_tokens = 0;
  std::int32_t longest_response = 0;

  static MiniBatchTotals of(std::span<const Rollout> rollouts);
};

// A divisor of 0 stands for the mini-batch's own value: its longest response, its loss tokens.
struct AggregationDivisors {
  double longest = 0;             // of seq-mean-token-sum-norm: --loss-scale-factor
  double loss_tokens = 0;         // of token-mean: --token-mean-divisor, or what the records have
  double items_scale = 0;         // above 0, of token-mean: a record's num_items_in_batch times this divides its tokens
  double rollout_epsilon = 1e-8;  // added to a rollout's token count by seq-mean-token-mean: --token-count-epsilon

  // For the policy loss and the critic's. --token-mean-divisor wins. Then, where records have num_items_in_batch,
  // each one's own times --token-divisor-scale (TRL 1.16, _compute_loss: the generation batch's tokens rescaled to one
  // accumulation window). Then, where records have a token_divisor, the sum over the mini-batch of those, and of the
  // loss tokens of those that have none.
  // Errors: InputError where the scale is -1 and num_items_in_batch is not the number of the mini-batch's loss tokens;
  // where only some records have num_items_in_batch.
  static AggregationDivisors from(const Options& options, std::span<const Rollout> rollouts, Aggregation aggregation);
};

// w_i of each rollout of the mini-batch. A rollout without loss tokens has a finite weight that multiplies nothing.
std::vector<double> compute_token_weights(std::span<const Rollout> rollouts, const MiniBatchTotals& totals,
                                          Aggregation aggregation, const AggregationDivisors& divisors);

}  // namespace espalier
