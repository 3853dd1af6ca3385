// Checks recorded experts of rollouts against the model that will replay them.
#pragma once

#include <span>
#include <string>
#include <vector>

#include "espalier/rollout/rollout.h"
#include "espalier/shape/model_shape.h"

namespace espalier {

// Checks and sorts the recorded experts of every rollout. A record may have all layers or only expert layers;
// afterwards it has expert layers only. Errors: InputError with the rollout's place if the layers, the experts per
// token or an expert's number do not match the model, if a token has an expert of a layer twice, or if the model has no
// experts.
void fit_recorded_experts(std::vector<Rollout>& rollouts, const ModelShape& shape);

// A note: how many rollouts have records, and how many prompt tokens are not shared because their records differ; empty
// without records.
std::string recorded_experts_note(std::span<const Rollout> rollouts);

}  // namespace espalier
