// The executor of one process: every event runs to its end before the next one begins.
#pragma once

#include "espalier/phase/step_run.h"

namespace espalier {

// Runs all items of the plan in the order of the schedule. Adds every parameter's gradient and has the head score every
// edge; returns what was counted and measured.
RunResult run_one_after_another(const StepRun& step, const StepPlan& plan);

}  // namespace espalier
