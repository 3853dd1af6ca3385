#include "espalier/objective/rollout_weights.h"

#include <algorithm>
#include <cmath>

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

}  // namespace espalier
