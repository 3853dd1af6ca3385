// `train`: optimizer steps from recorded rollouts, and everything that is read and written around them.
#pragma once

#include <functional>

#include "espalier/observe/progress.h"
#include "espalier/step/step.h"

namespace espalier {

// Runs the steps that the options ask for and writes --out, --gradients, --logprobs and --record at the end: complete,
// or not at all. `on_step` sees every step's report as it ends. Errors: those of reading, planning and writing; nothing
// that was on disk before has changed then.
void train(const Options& options, Progress& progress, const std::function<void(const StepReport&)>& on_step);

}  // namespace espalier
