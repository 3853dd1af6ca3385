// `train`: optimizer steps from recorded rollouts, and everything that is read and written around them.
#pragma once

#include <functional>

#include "espalier/base/json.h"
#include "espalier/metrics/progress.h"
#include "espalier/step/step.h"

namespace espalier {

// Sees every step's report as it ends, and the line that metrics.jsonl gets of it.
using TrainStep = std::function<void(const StepReport& report, const Json& line)>;

// The signal of an interrupt that has reached any rank, the same on all ranks; 0: none has.
int signal_of_any_rank(const Progress& progress, const Mesh& mesh);

// Runs the steps that the options ask for and writes --out, --gradients, --logprobs, --rollout-metrics and --record at
// the end: complete, or not at all; --out also every --save-freq steps. Errors: from reading, planning and writing;
// files that existed before are then unchanged, except for --out if a checkpoint was saved. On an interrupt with --out
// the step is finished, --out is saved and Interrupted is thrown.
// Every rank of the mesh runs it; rank 0 writes and is told of the steps.
void train(const Options& options, Progress& progress, const TrainStep& on_step, const Mesh& mesh = mesh_of_one());

}  // namespace espalier
