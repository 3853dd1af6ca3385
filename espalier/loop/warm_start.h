// The supervised start of a fresh model: right answers to the task's questions, until it is right now and then.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>

#include "espalier/loop/task.h"
#include "espalier/observe/progress.h"
#include "espalier/options/options.h"
#include "espalier/plan/cost_model.h"
#include "espalier/step/model_state.h"

namespace espalier {

struct WarmStartStep {
  std::int64_t step = 0;           // from 1
  double loss = 0;                 // mean of -log p over the answers' tokens
  double right = 0;                // mean probability of the whole right answer, on this step's new problems
  std::int64_t prompt_length = 0;  // of this step's problems
  std::optional<double> held_out;  // the same on held-out problems of the full length; every kProbeEvery steps
};

// Prompts are short at first, for a fact is found sooner among two than among a hundred; their length doubles whenever
// `right`, smoothed over steps, has reached kStageRight. The warm start ends as soon as `held_out`, the accuracy to
// expect at temperature 1, has reached kWarmStartRight: the model then answers right now and then, which GRPO needs.
inline constexpr double kStageRight = 0.7, kWarmStartRight = 0.25;
inline constexpr std::int64_t kProbeEvery = 10;

// Minimises -log p(answer and end) by AdamW at --warm-start-lr, at most --warm-start-steps steps. Documents of a step
// are asked many questions each, so most rows are shared. Overwrites the model's weights. Returns what the last step
// found.
WarmStartStep warm_start(ModelState& model, const Task& task, const Options& options, const MachineProfile& machine,
                         Progress& progress, const std::function<void(const WarmStartStep&)>& on_step);

}  // namespace espalier
