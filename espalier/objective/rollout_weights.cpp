#include "espalier/objective/rollout_weights.h"

#include <algorithm>
#include <cmath>

#include "espalier/objective/token_rules.h"

namespace espalier {

RolloutWeights RolloutWeights::from(const Options& options) {
  return {options.rollout_is, options.rollout_is_mode, options.rollout_is_floor, options.rollout_is_threshold,
          options.log_ratio_bound};
}

double RolloutWeights::weight(double log_ratio) const {
  const double ratio = std::exp(std::clamp(log_ratio, -bound, bound));
  if (beyond == OutOfBounds::mask) return ratio < floor || ratio > threshold ? 0.0 : ratio;
  return std::min(std::max(ratio, floor), threshold);
}

bool RolloutWeights::keeps(double mean_log_ratio) const {
  const double ratio = std::exp(mean_log_ratio);
  return ratio >= floor && ratio <= threshold;
}

double RolloutWeights::unclipped_weight(double log_ratio) const {
  const double ratio = std::exp(log_ratio);
  return std::isfinite(ratio) ? ratio : 0.0;
}

namespace {

// old - roll of the token; 0 where the sampler's log-prob is not recorded.
double mismatch(const PolicyToken& token) {
  return token.old_logprob - token.rollout->sampled_logprob(token.position, token.old_logprob);
}

}  // namespace

double token_weight_rule(const Options& options, const SequenceConstants&, TokenPart& part) {
  return part.factor *= RolloutWeights::from(options).weight(mismatch(part.token));
}

double sequence_weight_rule(const Options&, const SequenceConstants& sequence, TokenPart& part) {
  return part.factor *= sequence.sampler_weight;
}

double kept_sequence_rule(const Options& options, const SequenceConstants& sequence, TokenPart& part) {
  const bool kept = sequence.sampler_weight != 0;
  return part.factor *= kept ? RolloutWeights::from(options).unclipped_weight(mismatch(part.token)) : 0;
}

}  // namespace espalier
