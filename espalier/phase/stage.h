// The executor of one stage of pp: which of its waves wait for the stages behind it, and when their gradients come.
//
// Of S stages the s-th, counted from 0, has up to S - s waves in flight: it runs the forward of so many before the
// backward of the first, then one forward and one backward in turn. Waves end in the order they began, so each has a
// region of memory to itself, of which it holds what it saves. Before a trunk's forward and its backward those before
// it have ended; nothing else waits for anything but what a neighbour sends. The last stage, or the only one, ends
// every event before it begins the next. Where ranks meet that have other rows than each other, waves of others count
// among those in flight, so that all stages keep one order.
#pragma once

#include "espalier/phase/step_run.h"

namespace espalier {

// Runs all items of the plan in the order of the schedule. Adds every parameter's gradient and has the head score every
// edge; returns what was counted and measured. Every stage calls it with the same plan.
RunResult run_stage(const StepRun& step, const StepPlan& plan);

}  // namespace espalier
