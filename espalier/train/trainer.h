// `train`: optimizer steps from recorded rollouts, and everything that is read and written around them.
#pragma once

#include <functional>

#include "espalier/observe/progress.h"
#include "espalier/step/step.h"

namespace espalier {

// Runs the steps that the options ask for and writes --out, --gradients, --logprobs and --record at the end: complete,
// or not at all; --out also every --save-freq steps. `on_step` sees every step's report as it ends. Errors: those of
// reading, planning and writing; what was on disk before has not changed then, but for --out where it was saved. On an
// interrupt with --out the step is finished, --out is saved and Interrupted is thrown.
void train(const Options& options, Progress& progress, const std::function<void(const StepReport&)>& on_step);

}  // namespace espalier
