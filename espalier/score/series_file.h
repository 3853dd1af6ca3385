// Log-probs and entropies of rollouts as JSON Lines, in input order: {"index": i, "logprobs": [...], "entropies":
// [...]}.
#pragma once

#include <span>
#include <string>

#include "espalier/execute/language_head.h"
#include "espalier/rollout/rollout.h"

namespace espalier {

// One line per rollout, ascending by `index`; one value per response token. Complete or absent.
void write_series(const std::string& path, std::span<const Rollout> rollouts, std::span<const RolloutSeries> series);

}  // namespace espalier
