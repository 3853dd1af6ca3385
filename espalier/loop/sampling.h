// Samples the policy: the rollouts of a batch with their rewards, and answers to held-out problems.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "espalier/base/json.h"
#include "espalier/device/arena.h"
#include "espalier/generate/sampler.h"
#include "espalier/loop/questions.h"
#include "espalier/metrics/progress.h"
#include "espalier/model/decoder.h"
#include "espalier/options/options.h"
#include "espalier/rollout/rollout.h"
#include "espalier/state/held_models.h"

namespace espalier {

struct Answer {
  std::string prompt, response, expected;
  std::optional<double> reward;  // none: not judged
};

struct SampledBatch {
  std::vector<Rollout> rollouts;  // group after group, with reward and rollout_logprobs
  std::vector<Answer> answers;    // the first one to each prompt
  double reward = 0, accuracy = 0,
         mean_length = 0;            // of everything that was sampled and judged, dropped groups included
  std::int64_t unjudged = 0;         // responses without a reward
  std::int64_t longest = 0;          // tokens of the longest response
  std::optional<double> mean_turns;  // with --env
  std::int64_t groups_dropped = 0;   // of equal rewards; 0 without --filter-groups
  std::int64_t samplings = 0;
  std::int64_t prompts_drawn = 0;  // for this batch
  std::int64_t tokens_saved = 0;   // prompt tokens that sharing did not compute
  double seconds = 0;
  Json generated = Json::object();  // the generator's report
};

struct Evaluation {
  double accuracy = 0, reward = 0, mean_length = 0;
  std::optional<double> mean_turns;  // with --env
  std::vector<Answer> answers;
};

// Errors: OptionError for options that contradict each other.
void check_sampling(const Options& options);

class Sampling {
 public:
  // `held`: the models of the run; keys and values get the memory that these leave of the budget, a quarter of it at
  // most. The arena may be that of updates.
  Sampling(const Options& options, Questions& questions, const Decoder& decoder, std::span<const HeldModel> held,
           Arena& arena, Progress& progress);

  // Batch `index` (from 0): the next --train-batch-size prompts after `drawn`, --n responses each; with --filter-groups
  // groups of equal rewards are dropped and more are sampled. A function of the weights, the options and the arguments.
  SampledBatch batch(std::int64_t index, std::int64_t drawn);

  // The held-out prompts, the same ones at every call, answered greedily; empty without held-out prompts.
  std::optional<Evaluation> evaluate();

  // Tokens of the longest rollout.
  std::int64_t longest_rollout() const;

 private:
  struct Scored {
    std::vector<Rollout> rollouts;
    std::vector<std::int64_t> trajectory;  // of each rollout, as Generated has it
    GenerateReport report;
    std::vector<Judgement> judgements;
  };
  std::int64_t most_kv_bytes() const;
  Generated sampled(const std::vector<Prompt>& prompts, const SamplingSettings& settings);
  std::vector<Judgement> judge(std::vector<Rollout>& rollouts);
  Scored answer(std::vector<Prompt> prompts, const std::string& group, const SamplingSettings& settings);

  Options options_;
  Questions& questions_;
  const Decoder& decoder_;
  Arena& arena_;
  Progress& progress_;
  std::vector<Prompt> held_out_;
  std::int64_t budget_, held_bytes_;  // bytes of the run's budget; bytes of its models and of the process
  SamplingSettings sampled_;          // of training batches; the seed is that of the last sampling
};

}  // namespace espalier
