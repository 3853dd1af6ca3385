// The one schedule: every plan, dense, packed, phased or a tree of trunks, is this recursion (docs/architecture.md).
#pragma once

#include "espalier/phase/step_run.h"

namespace espalier {

// Runs all items. Adds every parameter's gradient, has the head score every edge, fills the counters, the seconds and
// the peaks.
void run_schedule(StepRun& step, const StepPlan& plan);

}  // namespace espalier
