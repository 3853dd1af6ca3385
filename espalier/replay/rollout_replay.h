// `replay` of recorded rollouts without a trace: repeats the optimizer steps in order, and compares the policy's
// log-probs with the recorded ones.
#pragma once

#include <functional>
#include <span>
#include <string>

#include "espalier/execute/language_head.h"
#include "espalier/replay/replay.h"
#include "espalier/rollout/rollout.h"

namespace espalier {

// Over the loss tokens of rollouts that have old_logprobs, d = ours - recorded: max |d|, mean |d|, and as `kl` the mean
// of exp(d) - 1 - d (k3, an estimate of KL(recorded || ours)). None: there is no such token.
// series: one per rollout, with a log-prob for each loss token.
std::optional<LogprobDifference> logprob_difference(std::span<const Rollout> rollouts,
                                                    std::span<const RolloutSeries> series);

// Runs the steps of `options` on the rollouts of `path` (any format that is read) from the weights of --model; by
// `step` where all records have one, ascending. Log-probs are compared before the step's update: where several steps
// train on rollouts of one policy, only the first of them should agree with it. Writes nothing. `on_step` sees each
// step.
ReplayReport replay_rollouts(const std::string& path, const Options& options, Progress& progress,
                             const std::function<void(const ReplayStep&)>& on_step, const Mesh& mesh = mesh_of_one());

}  // namespace espalier
