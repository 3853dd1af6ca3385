// The executor: runs the steps of a rank program (program/program.h) in order.
#pragma once

#include "espalier/execute/step_run.h"

namespace espalier {

// Runs all items of the plan. Adds every parameter's gradient and lets the head score every edge; returns counts and
// measurements. Every stage calls it with the same plan.
RunResult run_stage(const StepRun& step, const StepPlan& plan);

}  // namespace espalier
