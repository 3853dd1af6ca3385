// The supervised start of a fresh model: right answers to the task's questions, until it is right now and then.
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <optional>
#include <vector>

#include "espalier/forecast/cost_model.h"
#include "espalier/loop/task.h"
#include "espalier/observe/progress.h"
#include "espalier/optimizer/adamw.h"
#include "espalier/options/options.h"
#include "espalier/rollout/rollout.h"
#include "espalier/step/model_state.h"
#include "espalier/step/step.h"

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

// Documents that grow to the full length.
class Curriculum {
 public:
  explicit Curriculum(const Task& full);

  const Task& task() const { return task_; }
  void advance(double right);  // after a step

  double smoothed() const { return smoothed_; }
  void restore(std::int64_t prompt_length, double smoothed);

 private:
  Task task_;
  std::int64_t full_length_;
  double smoothed_ = 0;
};

// Minimises -log p(answer and end) by AdamW at --warm-start-lr, at most --warm-start-steps steps. Documents of a step
// are asked many questions each, so most rows are shared. Everything is a function of the options and the steps done,
// so that a warm start that is saved, loaded and run ends in the bits of one that was never interrupted.
class WarmStart {
 public:
  WarmStart(ModelState& model, const Task& task, const Options& options, const MachineProfile& machine);

  // Overwrites the model's weights, step by step. False: an interrupt came, and steps are left to run.
  bool run(Progress& progress, const std::function<void(const WarmStartStep&)>& on_step);
  const WarmStartStep& last() const { return last_; }

  // Saves a checkpoint with `metrics_bytes`, which load returns. Errors: OptionError; InputError in load.
  void save(const std::filesystem::path& directory, std::int64_t metrics_bytes) const;
  std::int64_t load(const std::filesystem::path& directory);

 private:
  WarmStartStep step();

  ModelState& model_;
  Options options_;
  const MachineProfile& machine_;
  AdamW optimizer_;
  Actor actor_;
  std::vector<Rollout> held_out_;
  Curriculum curriculum_;
  WarmStartStep last_;
};

}  // namespace espalier
