// The executor: runs the steps of a program (program/program.h), which says their order, one after the other.
#pragma once

#include "espalier/phase/step_run.h"

namespace espalier {

// Runs all items of the plan. Adds every parameter's gradient and has the head score every edge; returns what was
// counted and measured. Every stage calls it with the same plan.
RunResult run_stage(const StepRun& step, const StepPlan& plan);

}  // namespace espalier
