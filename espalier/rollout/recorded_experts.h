// The experts that an inference engine chose for the tokens of a rollout (RecordedExperts of rollout.h).
#pragma once

#include <string>

#include "espalier/rollout/rollout.h"

namespace espalier {

// Orders the experts of every token and layer, which are a set: afterwards equal sets are equal.
void sort_recorded_experts(RecordedExperts& experts);

// They as JSON, the value of the field `routed_experts` (recorded_experts_field.h).
std::string recorded_experts_json(const RecordedExperts& experts);

}  // namespace espalier
