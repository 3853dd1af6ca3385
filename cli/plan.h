// Common to the two answers of `espalier plan`: the plan of recorded rollouts, and the capacity frontier.
#pragma once

#include "cli/verbs.h"
#include "espalier/plan/planner.h"

namespace espalier::cli {

// The machine that is planned for, and the kind of device and memory that the options leave to it.
MachineProfile machine_of(Context& context, PlanOptions& options);

// Instead of a plan: the longest prompts (plan --frontier).
int run_frontier(Context& context);

}  // namespace espalier::cli
