// `replay`: a recorded trace run again, under any schedule, and compared with its recorded weights.
#pragma once

#include <filesystem>
#include <functional>
#include <optional>
#include <vector>

#include "espalier/metrics/progress.h"
#include "espalier/options/options.h"
#include "espalier/parallel/mesh.h"

namespace espalier {

// Compares our log-probs of loss tokens before a step's update with the recorded old_logprobs.
struct LogprobDifference {
  std::int64_t tokens = 0;
  double max_abs = 0, mean_abs = 0, kl = 0;
};

struct ReplayStep {
  std::int64_t step = 0;
  double loss = 0, grad_norm = 0;
  std::optional<double> recorded_loss = {}, recorded_grad_norm = {};
  std::optional<LogprobDifference> logprobs = {};  // where records are compared, not traces
};

// Differences between our weights and the recorded ones, over all elements, in float64.
struct CheckpointDifference {
  std::int64_t step = 0;
  double max_abs = 0, mean_abs = 0, rms = 0;
  double movement_rel_l2 = 0;  // |d ours - d theirs|_2 / |d theirs|_2, d: movement since the initial weights
};

struct ReplayReport {
  std::vector<ReplayStep> steps;
  std::vector<CheckpointDifference> checkpoints;
};

// Re-runs all updates in order with the options in trace.json. From `options` come the schedule, the budgets, the trunk
// state, what is shared, and the dtype where it is not the default. `on_checkpoint` sees each comparison as it is made.
// Errors: InputError for a trace that is damaged or whose records lack steps.
ReplayReport replay(const std::filesystem::path& directory, const Options& options, Progress& progress,
                    const std::function<void(const CheckpointDifference&)>& on_checkpoint,
                    const Mesh& mesh = mesh_of_one());

}  // namespace espalier
