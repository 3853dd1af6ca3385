#include "espalier/objective/rollout_weights.h"

#include <algorithm>
#include <cmath>

namespace espalier {

double truncated_weight(double log_ratio, double threshold) {
  constexpr double kBound = 20;
  return std::min(std::exp(std::clamp(log_ratio, -kBound, kBound)), threshold);
}

}  // namespace espalier
