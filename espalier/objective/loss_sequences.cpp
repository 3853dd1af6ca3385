#include "espalier/objective/loss_sequences.h"

#include <numeric>

#include "espalier/rollout/trajectories.h"

namespace espalier {

LossSequences LossSequences::from(const Options& options, std::span<const Rollout> rollouts) {
  LossSequences out;
  if (loss_unit_of(rollouts, options.loss_unit) == LossUnit::trajectory) {
    const Trajectories trajectories = trajectories_of(rollouts);
    for (const std::int64_t of : trajectories.of) out.of.push_back(static_cast<std::int32_t>(of));
    for (const auto& turns : trajectories.turns) out.rollouts.emplace_back(turns.begin(), turns.end());
  } else {
    for (std::int32_t i = 0; i < std::ssize(rollouts); ++i) out.of.push_back(i), out.rollouts.push_back({i});
  }
  for (const auto& members : out.rollouts) {
    double tokens = 0;
    for (const std::int32_t index : members) tokens += rollouts[static_cast<std::size_t>(index)].loss_tokens();
    out.tokens.push_back(tokens);
  }
  return out;
}

double LossSequences::all_tokens() const { return std::accumulate(tokens.begin(), tokens.end(), 0.0); }

}  // namespace espalier
