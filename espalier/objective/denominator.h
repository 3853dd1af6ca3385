// Weight of one loss token in the mini-batch's loss. Every aggregation is a weighted sum over loss tokens,
// agg(x) = sum_i w_i sum_t m_it x_it, with weights that are known before the first wave. So the loss does not depend on
// how the rollouts are cut into waves. Equations: docs/objectives.md (20) to (24).
// i sequence (a rollout, or all of a trajectory), t its response tokens, m share of the token's loss (1 for a loss
// token, 0 for a masked one), n_i = sum_t m_it, N = sum_i n_i, B sequences of the mini-batch.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "espalier/objective/loss_sequences.h"
#include "espalier/options/options.h"
#include "espalier/rollout/rollout.h"

namespace espalier {

// Aggregation of the critic's loss: --loss-agg-mode, by default token-mean for every policy loss.
Aggregation value_aggregation(const Options& options);

// Tokens whose loss_mask is 1, whatever their share.
std::int64_t count_loss_tokens(std::span<const Rollout> rollouts);

// The divisor 0 means the mini-batch's own value: its longest response, or the number of its loss tokens.
struct AggregationDivisors {
  double longest = 0;             // for seq-mean-token-sum-norm: --loss-scale-factor
  double loss_tokens = 0;         // for token-mean: --token-mean-divisor, or the records' token_divisor
  double items_scale = 0;         // for token-mean, if above 0: num_items_in_batch times this divides a record's tokens
  double rollout_epsilon = 1e-8;  // added to a rollout's token count by seq-mean-token-mean: --token-count-epsilon

  // For the policy loss and the critic's. The first of these that is given is used: --token-mean-divisor; each record's
  // num_items_in_batch times --token-divisor-scale (TRL 1.16, _compute_loss: the tokens of the generation batch,
  // rescaled to one accumulation window); the sum over the mini-batch of the records' token_divisor, where a record
  // without one adds the number of its loss tokens. Errors: InputError if the scale is -1 and num_items_in_batch is not
  // the number of the mini-batch's loss tokens, or if only some records have num_items_in_batch.
  static AggregationDivisors from(const Options& options, std::span<const Rollout> rollouts, Aggregation aggregation);
};

// w_i of each rollout of the mini-batch, that of its sequence. The weight of a sequence without loss tokens is finite
// and multiplies nothing. Everything is counted from the records before the first row runs. Every rank reads all
// records, so every rank has the same weights; computed values never enter a denominator.
std::vector<double> compute_token_weights(std::span<const Rollout> rollouts, const LossSequences& sequences,
                                          Aggregation aggregation, const AggregationDivisors& divisors);

}  // namespace espalier
