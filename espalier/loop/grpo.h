// `grpo`: the closed loop. Warm start of a fresh model, then batch after batch: generate, reward, old and reference
// log-probs, advantages, optimizer steps; evaluations on held-out problems, checkpoints, the trained model.
//
//   batch b = 0, 1, ...:  --train-batch-size prompts of --task or --prompts x --n responses by the current weights
//     rewards        the task's own, or from --reward or --env (responses are then trajectories of turns), plus
//                    overlong shaping; with --filter-groups, unequal groups alone
//     old log-probs  where a batch takes several steps or --rollout-is compares them with the sampler's: by the shared
//                    score pass, or the sampler's own if these are bitwise equal to training's; otherwise the policy's
//                    own in the step (ratio 1)
//     ref log-probs  by the weights the loop started from, where --kl-loss-coef is not 0
//     steps          advantages over the batch, --epochs passes over mini-batches of --mini-batch-size
//
// Everything is a function of the options: the same command gives bitwise identical results. A killed run continues
// from its newest checkpoint, and its results are bitwise identical to an uninterrupted run's.
#pragma once

#include <filesystem>
#include <functional>
#include <optional>
#include <span>

#include "espalier/loop/built_in_tasks.h"
#include "espalier/metrics/metrics.h"
#include "espalier/metrics/progress.h"
#include "espalier/options/options.h"
#include "espalier/parallel/mesh.h"
#include "espalier/program/step_plan.h"
#include "espalier/rollout/rollout.h"

namespace espalier {

inline constexpr std::int64_t kDefaultGrpoSteps = 60;  // optimizer steps where --steps is 0

// Parts that the program adds to the loop.
struct LoopParts {
  const BuiltInTasks& tasks;
  // A step's plan as it is kept in metrics.jsonl for the report page. Empty: none is kept.
  std::function<Json(const StepPlan& plan, std::span<const Rollout> rollouts)> picture = {};
};

struct GrpoReport {
  std::filesystem::path run;
  std::int64_t steps = 0;          // optimizer steps in all, those before a continuation included
  std::optional<double> accuracy;  // on held-out prompts, at the end; none where there are none
  bool nothing_left = false;       // ended early: --filter-groups found no group of unequal rewards
};

// Works in the folder --out, or continues the run in --resume (or in --out, where that is one). `on_line` sees
// every line of metrics.jsonl as it is written. No new batch is begun once --steps optimizer steps are done. On
// an interrupt the batch's running steps are finished and saved, then Interrupted is thrown. Errors:
// OptionError, InputError, UnsupportedError, and errors of the parts; the run can be continued after each. Every
// rank of the mesh runs it; rank 0 writes, rewards and sees the lines. --out must be a folder that all of them
// see.
GrpoReport grpo(const Options& options, const LoopParts& parts, Progress& progress, const MetricLine& on_line,
                const Mesh& mesh = mesh_of_one());

}  // namespace espalier
