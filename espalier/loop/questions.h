// Questions of the closed loop and the scoring of answers: a built-in task, or the user's prompts.
#pragma once

#include <cstdint>
#include <filesystem>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "espalier/generate/sampler.h"
#include "espalier/generate/turn_texts.h"
#include "espalier/metrics/progress.h"
#include "espalier/options/options.h"
#include "espalier/services/environment.h"
#include "espalier/shape/model_shape.h"

namespace espalier {

// None: the response was not judged.
struct Judgement {
  std::optional<double> reward;  // before shaping
  std::optional<double> right;   // what `accuracy` is the mean of
};

// The place in a run at which prompts are drawn. It follows from the options and the run so far.
struct Draw {
  std::int64_t batch = 0, sampling = 0;  // from 0; several samplings with --filter-groups
  std::int64_t drawn = 0;                // prompts that were drawn for training before
};

class Questions {
 public:
  virtual ~Questions() = default;

  // The next `count` prompts for training. They carry `prompt` (its text), `data_source`, `ground_truth` and the file's
  // other fields; the caller sets their `group`.
  virtual std::vector<Prompt> train(const Draw& draw, std::int64_t count) = 0;
  // The first --val-size held-out prompts, always the same; none where there are none.
  virtual std::vector<Prompt> held_out() = 0;

  // Adds `response`, its text, to the rollouts' carried fields, and scores them. Errors: as RewardFunction.
  virtual std::vector<Judgement> judge(std::vector<Rollout>& rollouts, Progress& progress) = 0;

  virtual std::int64_t longest_prompt() const = 0;                // tokens
  virtual const std::vector<std::int32_t>& stop_ids() const = 0;  // what ends a response
  virtual StopStrings* stops() { return nullptr; }                // texts that end a response
  virtual TurnTexts& turn_texts() = 0;                            // for an environment
  // Identifies the set of prompts when a run continues; empty if the options identify it.
  virtual std::string fingerprint() const = 0;

  // The turns of --env, whose rewards replace judge(); null: judge() gives the rewards.
  Environment* environment() const { return environment_.get(); }
  void set_environment(std::unique_ptr<Environment> environment) { environment_ = std::move(environment); }

 private:
  std::unique_ptr<Environment> environment_;
};

// True if a model directory holds weights beside its config.json.
bool has_weights(const std::filesystem::path& directory);

class BuiltInTasks;

// `source`: the directory of the model's tokenizer. All errors of prompts, tokenizer and reward function are found
// here. Errors: OptionError, InputError, UnsupportedError.
std::unique_ptr<Questions> make_questions(const Options& options, const BuiltInTasks& tasks,
                                          const std::filesystem::path& source, const ModelShape& shape,
                                          Progress& progress);

}  // namespace espalier
