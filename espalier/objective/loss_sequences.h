// The sequences of a mini-batch's loss: each record, or all records of a trajectory (--loss-unit). Sequence means,
// ratios and weights go by them. docs/objectives.md, "Sequences".
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "espalier/options/options.h"
#include "espalier/rollout/rollout.h"

namespace espalier {

struct LossSequences {
  std::vector<std::int32_t> of;                     // one per rollout: its sequence
  std::vector<std::vector<std::int32_t>> rollouts;  // one per sequence: its rollouts, the first turn first
  std::vector<double> tokens;                       // one per sequence: its loss tokens, each counted by its share

  static LossSequences from(const Options& options, std::span<const Rollout> rollouts);

  double count() const { return static_cast<double>(rollouts.size()); }
  double all_tokens() const;
};

}  // namespace espalier
