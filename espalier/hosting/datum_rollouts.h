// A client's data as the engine's rollouts, and the terms of their losses.
#pragma once

#include <vector>

#include "espalier/objective/datum_loss.h"
#include "espalier/rollout/rollout.h"
#include "espalier/serve/calls.h"

namespace espalier {

// One rollout for each datum, with given targets.
struct DatumRollouts {
  explicit DatumRollouts(const std::vector<const serve::TrainingCall*>& calls);

  std::vector<Rollout> rollouts;
  std::vector<DatumTerms> terms;
};

}  // namespace espalier
