#include "espalier/objective/denominator.h"

#include <algorithm>

#include "espalier/base/error.h"

namespace espalier {

Aggregation value_aggregation(const Options& options) {
  const Aggregation given = options.loss_agg_mode;
  return given == Aggregation::of_the_loss ? Aggregation::token_mean : given;
}

std::int64_t count_loss_tokens(std::span<const Rollout> rollouts) {
  std::int64_t tokens = 0;
  for (const Rollout& rollout : rollouts)
    tokens += std::ranges::count_if(rollout.loss_mask, [](std::uint8_t m) { return m != 0; });
  return tokens;
}

namespace {

// The factor of the records' num_items_in_batch; 0: it has no part.
double items_scale_of(const Options& options, std::span<const Rollout> rollouts) {
  const double scale = options.token_divisor_scale;
  const auto has_items = [](const Rollout& rollout) { return rollout.num_items_in_batch.has_value(); };
  if (scale == 0 || std::ranges::none_of(rollouts, has_items)) return 0;
  if (const auto bare = std::ranges::find_if_not(rollouts, has_items); bare != rollouts.end())
    throw InputError({bare->where, "a field num_items_in_batch, as in other records of the mini-batch", "none",
                      "give --token-mean-divisor, or --token-divisor-scale 0 for their own loss tokens"});
  if (scale > 0) return scale;
  double tokens = 0;
  for (const Rollout& rollout : rollouts) tokens += rollout.loss_tokens();
  for (const Rollout& rollout : rollouts)
    if (*rollout.num_items_in_batch != tokens)
      throw InputError({rollout.where + ": num_items_in_batch",
                        text_of(tokens,
                                ", the loss tokens of the mini-batch, or options that say how TRL divided the "
                                "generation batch"),
                        text_of(*rollout.num_items_in_batch),
                        "give the trainer's --gradient-accumulation-steps and --steps-per-generation, or "
                        "--token-divisor-scale 0 for the mini-batch's own loss tokens"});
  return 1;
}

}  // namespace

AggregationDivisors AggregationDivisors::from(const Options& options, std::span<const Rollout> rollouts,
                                              Aggregation aggregation) {
  AggregationDivisors divisors{options.loss_scale_factor, options.token_mean_divisor, 0, options.token_count_epsilon};
  if (divisors.loss_tokens > 0 || aggregation != Aggregation::token_mean) return divisors;
  divisors.items_scale = items_scale_of(options, rollouts);
  if (divisors.items_scale > 0) return divisors;
  double sum = 0;
  bool recorded = false;
  for (const Rollout& rollout : rollouts) {
    recorded = recorded || rollout.token_divisor;
    sum += rollout.token_divisor.value_or(rollout.loss_tokens());
  }
  if (recorded) divisors.loss_tokens = sum;
  return divisors;
}

std::vector<double> compute_token_weights(std::span<const Rollout> rollouts, const LossSequences& sequences,
                                          Aggregation aggregation, const AggregationDivisors& divisors) {
  const double count = sequences.count();
  double scale = divisors.longest;
  if (scale <= 0) {
    scale = 1;
    for (const Rollout& rollout : rollouts) scale = std::max<double>(scale, rollout.response_length());
  }
  const double divisor = divisors.loss_tokens > 0 ? divisors.loss_tokens : sequences.all_tokens();

  std::vector<double> weights;
  weights.reserve(rollouts.size());
  for (std::size_t i = 0; i < rollouts.size(); ++i) {
    const Rollout& rollout = rollouts[i];
    const double tokens = sequences.tokens[static_cast<std::size_t>(sequences.of[i])];
    switch (aggregation) {
      case Aggregation::token_sum:
        weights.push_back(1);
        break;
      case Aggregation::token_mean:
        weights.push_back(divisors.items_scale > 0
                              ? 1.0 / (std::max(*rollout.num_items_in_batch, 1.0) * divisors.items_scale)
                          : divisor > 0 ? 1.0 / divisor
                                        : 0.0);
        break;
      case Aggregation::seq_mean_token_sum:
        weights.push_back(1.0 / count);
        break;
      case Aggregation::seq_mean_token_sum_norm:
        weights.push_back(1.0 / count / scale);
        break;
      case Aggregation::seq_mean_token_mean:
        weights.push_back(tokens > 0 ? 1.0 / count / (tokens + divisors.rollout_epsilon) : 0.0);
        break;
      case Aggregation::of_the_loss:
        ESPALIER_INTERNAL(false, "the aggregation of a loss is resolved before it weighs tokens");
    }
  }
  return weights;
}

}  // namespace espalier
