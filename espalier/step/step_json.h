// A step's report as JSON: what `train` and `grpo` print with --json and what a run's metrics.jsonl holds. The fields
// are part of the stable surface: names stay, more may be added.
#pragma once

#include <string>

#include "espalier/base/json.h"
#include "espalier/step/step.h"

namespace espalier {

// The schedule of a plan's trees by name; "mixed" where they differ.
std::string schedule_name(const PassReport& report);

Json profile_json(const StepProfile& profile);
Json step_json(const StepReport& step);

}  // namespace espalier
