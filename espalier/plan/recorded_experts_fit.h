// Recorded experts of rollouts against the model that is to choose them again.
#pragma once

#include <span>
#include <string>
#include <vector>

#include "espalier/rollout/rollout.h"
#include "espalier/shape/model_shape.h"

namespace espalier {

// Checks every record of experts and sorts it. A record may hold all layers or those with experts alone; afterwards it
// holds the latter. Errors: InputError with the rollout's place where layers, experts a token or an expert's number are
// not the model's, or where the model has no experts.
void fit_recorded_experts(std::vector<Rollout>& rollouts, const ModelShape& shape);

// How many rollouts have records, and how many prompt tokens are not shared because their records differ; empty where
// there are none.
std::string recorded_experts_note(std::span<const Rollout> rollouts);

}  // namespace espalier
