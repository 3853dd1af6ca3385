// A step's report as JSON, printed by `train` and `grpo` with --json and written to a run's metrics.jsonl. The field
// names are part of the stable interface; fields may be added.
#pragma once

#include <string>

#include "espalier/base/json.h"
#include "espalier/step/step.h"

namespace espalier {

// The name of the schedule of a plan's trees; "mixed" if they differ.
std::string schedule_name(const PassReport& report);

Json profile_json(const StepProfile& profile);
Json step_json(const StepReport& step);

}  // namespace espalier
