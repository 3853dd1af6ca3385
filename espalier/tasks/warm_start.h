// The supervised start of a fresh model: right answers to the task's questions, until it is right now and then.
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <optional>
#include <vector>

#include "espalier/forecast/cost_model.h"
#include "espalier/loop/built_in_tasks.h"
#include "espalier/metrics/progress.h"
#include "espalier/optimizer/adamw.h"
#include "espalier/options/options.h"
#include "espalier/rollout/rollout.h"
#include "espalier/state/model_state.h"
#include "espalier/step/step.h"
#include "espalier/tasks/task.h"

namespace espalier {

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
// are asked many questions each, so most rows are shared. Everything is a function of the options and the steps done.
class TaskWarmStart final : public WarmStart {
 public:
  TaskWarmStart(ModelState& model, const Task& task, const Options& options, const MachineProfile& machine);

  bool run(Progress& progress, const std::function<void(const WarmStartStep&)>& on_step) override;
  const WarmStartStep& last() const override { return last_; }
  bool learned() const override { return last_.held_out.value_or(0) >= kWarmStartRight; }
  void save(const std::filesystem::path& directory, std::int64_t metrics_bytes) const override;
  std::int64_t load(const std::filesystem::path& directory) override;

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
