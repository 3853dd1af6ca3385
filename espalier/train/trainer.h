// `train`: optimizer steps from recorded rollouts, and everything that is read and written around them.
#pragma once

#include <functional>

#include "espalier/base/json.h"
#include "espalier/observe/progress.h"
#include "espalier/step/step.h"

namespace espalier {

// Sees every step's report as it ends, and the line that metrics.jsonl gets of it.
using TrainStep = std::function<void(const StepReport& report, const Json& line)>;

// An interrupt may reach one rank before the others: all of them are told of it. 0: there was none.
int signal_of_any_rank(const Progress& progress, const Mesh& mesh);

// Runs the steps that the options ask for and writes --out, --gradients, --logprobs, --rollout-metrics and --record at
// the end: complete, or not at all; --out also every --save-freq steps. Errors: those of reading, planning and writing;
// what was on disk before has not changed then, but for --out where it was saved. On an interrupt with --out the step
// is finished, --out is saved and Interrupted is thrown.
// Every rank of the mesh runs it; rank 0 writes and is told of the steps.
void train(const Options& options, Progress& progress, const TrainStep& on_step, const Mesh& mesh = mesh_of_one());

}  // namespace espalier
