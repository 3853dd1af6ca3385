#include "espalier/objective/value_loss.h"

#include <algorithm>

#include "espalier/base/error.h"
#include "espalier/objective/denominator.h"
#include "espalier/objective/share_of_maximum.h"

namespace espalier {
ValueTerm value_term(double value, double old_value, double target, double cliprange) {
  const double low = old_value - cliprange, high = old_value + cliprange;
  const double clipped = std::max(std::min(value, high), low);
  const double passed = share_of_maximum(high, value) * share_of_maximum(value, low);  // d clipped / d value
  const double plain_square = (value - target) * (value - target);
  const double clipped_square = (clipped - target) * (clipped - target);
  const double share = share_of_maximum(plain_square, clipped_square);
  return {0.5 * std::max(plain_square, clipped_square),
          share * (value - target) + (1 - share) * passed * (clipped - target), clipped_square > plain_square};
}

ValueObjective::ValueObjective(std::span<const Rollout> rollouts, std::span<const std::vector<double>> targets,
                               const Options& options)
    : rollouts_(rollouts),
      targets_(targets),
      cliprange_(options.cliprange_value),
      token_weight_(compute_token_weights(rollouts, LossSequences::from(options, rollouts), value_aggregation(options),
                                          AggregationDivisors::from(options, rollouts, value_aggregation(options)))),
      all_loss_tokens_(count_loss_tokens(rollouts)) {
  ESPALIER_INTERNAL_EQ(rollouts.size(), targets.size());
  for (std::size_t i = 0; i < rollouts.size(); ++i) {
    ESPALIER_INTERNAL_EQ(targets[i].size(), rollouts[i].response_ids.size(), rollouts[i].where);
    if (rollouts[i].values.size() != rollouts[i].response_ids.size())
      throw InputError({rollouts[i].where, "a field values, for --critic", "none",
                        "add values (espalier score --critic DIR --values)"});
  }
}

double ValueObjective::add_token(std::int32_t index, std::int32_t position, double value) {
  const auto i = static_cast<std::size_t>(index), t = static_cast<std::size_t>(position);
  const Rollout& rollout = rollouts_[i];
  if (!rollout.loss_mask[t]) return 0;
  // A return that moved with the value would make the loss that of the advantage alone.
  const double target = targets_[i][t];
  const ValueTerm term = value_term(value, rollout.values[t], target, cliprange_);
  const double weight = token_weight_[i] * rollout.loss_share(t);
  loss_.add(weight * term.loss);
  values_.add(value);
  ++loss_tokens_;
  clipped_tokens_ += term.clipped;
  return weight * term.gradient;
}

void ValueObjective::add_edges(std::span<const LossEdge> edges, std::span<const double> value,
                               std::span<double> grad_value) {
  for (std::size_t e = 0; e < edges.size(); ++e)
    grad_value[e] = add_token(edges[e].rollout, edges[e].position, value[e]);
}

ValueLossParts ValueObjective::parts() const {
  ValueLossParts parts;
  parts.loss = loss_.value();
  parts.loss_tokens = loss_tokens_;
  if (all_loss_tokens_ == 0) return parts;
  parts.clip_fraction = static_cast<double>(clipped_tokens_) / static_cast<double>(all_loss_tokens_);
  parts.values_mean = values_.value() / static_cast<double>(all_loss_tokens_);
  return parts;
}

}  // namespace espalier
