// The supervised start of a fresh model: right answers to the task's questions, until it is right now and then.
#pragma once

#include <cstdint>
#include <functional>

#include "espalier/loop/task.h"
#include "espalier/observe/progress.h"
#include "espalier/options/options.h"
#include "espalier/plan/cost_model.h"
#include "espalier/train/model_state.h"

namespace espalier {

struct WarmStartStep {
  std::int64_t step = 0;  // from 1
  double loss = 0;        // mean of -log p over the answers' tokens
  double right = 0;       // mean probability of the whole right answer: the accuracy to expect at temperature 1
  std::int64_t prompt_length = 0;
  bool reached = false;  // right enough at the full prompt length
};

// Prompts are short at first, for a fact is found sooner among two than among a hundred; their length doubles whenever
// `right`, smoothed over steps, has reached kStageRight. At the full prompt length the warm start ends as soon as it
// reaches kWarmStartRight. Problems are never seen twice, so both are accuracies on unseen problems.
inline constexpr double kStageRight = 0.7, kWarmStartRight = 0.2;

// Minimises -log p(answer and end) by AdamW at --warm-start-lr, at most --warm-start-steps steps. Documents of a step
// are asked many questions each, so most rows are shared. Overwrites the model's weights. Returns what the last step
// found.
WarmStartStep warm_start(ModelState& model, const Task& task, const Options& options, const MachineProfile& machine,
                         Progress& progress, const std::function<void(const WarmStartStep&)>& on_step);

}  // namespace espalier
