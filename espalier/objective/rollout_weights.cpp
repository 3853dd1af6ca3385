#include "espalier/objective/rollout_weights.h"

#include <algorithm>
#include <cmath>

#include "espalier/base/error.h"

namespace espalier {

RolloutCorrection parse_rollout_correction(const std::string& name) {
  if (name == "none") return RolloutCorrection::none;
  if (name == "token") return RolloutCorrection::token;
  if (name == "sequence") return RolloutCorrection::sequence;
  throw OptionError({"--rollout-is", "none, token or sequence", name, "choose one of these"});
}

double truncated_weight(double log_ratio, double threshold) {
  constexpr double kBound = 20;
  return std::min(std::exp(std::clamp(log_ratio, -kBound, kBound)), threshold);
}

}  // namespace espalier
