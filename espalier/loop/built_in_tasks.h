// Built-in tasks as the closed loop sees them: questions for a run without --prompts, a model for one without --model,
// and right answers for a model without weights. The loop knows no task; the program gives it the tasks of
// espalier/tasks/.
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <memory>
#include <optional>

#include "espalier/base/json.h"
#include "espalier/forecast/cost_model.h"
#include "espalier/loop/questions.h"
#include "espalier/metrics/progress.h"
#include "espalier/options/options.h"
#include "espalier/shape/model_shape.h"
#include "espalier/state/model_state.h"

namespace espalier {

struct WarmStartStep {
  std::int64_t step = 0;           // from 1
  double loss = 0;                 // mean of -log p over the answers' tokens
  double right = 0;                // mean probability of the whole right answer, on this step's new problems
  std::int64_t prompt_length = 0;  // of this step's problems
  std::optional<double> held_out;  // the same on held-out problems of the full length; only now and then
};

// The supervised start of a model without weights. A warm start that is saved, loaded and run ends in the bits of one
// that was never interrupted.
class WarmStart {
 public:
  virtual ~WarmStart() = default;

  // Overwrites the model's weights, step by step. False: an interrupt came, and steps are left to run.
  virtual bool run(Progress& progress, const std::function<void(const WarmStartStep&)>& on_step) = 0;
  virtual const WarmStartStep& last() const = 0;
  // True if the last step answers held-out problems right often enough for GRPO to learn from them.
  virtual bool learned() const = 0;

  // Saves a checkpoint with `metrics_bytes`, which load returns. Errors: OptionError; InputError in load.
  virtual void save(const std::filesystem::path& directory, std::int64_t metrics_bytes) const = 0;
  virtual std::int64_t load(const std::filesystem::path& directory) = 0;
};

class BuiltInTasks {
 public:
  virtual ~BuiltInTasks() = default;

  // The questions of --task. Errors: OptionError for prompts or responses that are too short for it.
  virtual std::unique_ptr<Questions> questions(const Options& options) const = 0;
  // The tasks' words must be the first tokens of the user's model. Errors: InputError naming words that it lacks.
  virtual void check_words(const std::filesystem::path& model, const ModelShape& shape) const = 0;

  // config.json of a fresh model, --fresh.
  virtual Json fresh_config(const Options& options) const = 0;
  // Creates `directory` with that config.json and a tokenizer, without weights. Errors: OptionError where it cannot be
  // written.
  virtual void write_fresh_model(const std::filesystem::path& directory, const Json& config) const = 0;
  virtual std::unique_ptr<WarmStart> warm_start(ModelState& model, const Options& options,
                                                const MachineProfile& machine) const = 0;
};

}  // namespace espalier
