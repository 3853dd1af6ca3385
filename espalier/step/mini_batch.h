// The input of one update.
#pragma once

#include <span>
#include <vector>

#include "espalier/rollout/rollout.h"

namespace espalier {

using TokenSeries = std::vector<std::vector<double>>;  // one series per rollout, one number per response token

struct MiniBatch {
  std::span<const Rollout> rollouts;
  std::span<const std::vector<double>> advantages;    // one series per rollout
  std::span<const std::vector<double>> targets = {};  // for the critic's values; empty without a critic
};

}  // namespace espalier
