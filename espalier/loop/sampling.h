// The policy's answers: the rollouts of a batch with their rewards, and the held-out problems of an evaluation.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "espalier/base/json.h"
#include "espalier/device/arena.h"
#include "espalier/generate/sampler.h"
#include "espalier/loop/reward.h"
#include "espalier/loop/task.h"
#include "espalier/model/decoder.h"
#include "espalier/observe/progress.h"
#include "espalier/options/options.h"
#include "espalier/rollout/rollout.h"

namespace espalier {

struct SampledBatch {
  std::vector<Rollout> rollouts;                     // group after group, with reward and rollout_logprobs
  double reward = 0, accuracy = 0, mean_length = 0;  // of everything that was sampled, dropped groups included
  std::int64_t longest = 0;                          // tokens of the longest response
  std::int64_t groups_dropped = 0;                   // of equal rewards; 0 without --filter-groups
  std::int64_t samplings = 0;
  std::int64_t tokens_saved = 0;  // prompt tokens that sharing did not compute
  double seconds = 0;
  Json generated = Json::object();  // the generator's report
};

struct Answer {
  std::string prompt, response, expected;
  double reward = 0;
};

struct Evaluation {
  double accuracy = 0, reward = 0, mean_length = 0;
  std::vector<Answer> answers;
};

// Errors: OptionError for options that contradict each other or the task.
void check_sampling(const Options& options);

class Sampling {
 public:
  Sampling(const Options& options, const Decoder& decoder, Arena& arena, Progress& progress);

  // Batch `index` (from 0): --train-batch-size new training problems, --n responses each; with --filter-groups groups
  // of equal rewards are dropped and more are sampled. A function of the weights, the options and the index.
  SampledBatch batch(std::int64_t index);

  // --val-size held-out problems, the same ones at every call, answered greedily.
  Evaluation evaluate();

  // Most bytes of keys and values that a batch or an evaluation holds at once.
  std::int64_t most_kv_bytes() const;

 private:
  struct Scored {
    std::vector<Rollout> rollouts;
    std::vector<const Problem*> problems;  // of each rollout
    std::vector<double> rewards;           // before shaping
  };
  Scored answer(const std::vector<Problem>& problems, const std::string& group, const SamplingSettings& settings,
                GenerateReport* report);

  Options options_;
  Task task_;
  const Decoder& decoder_;
  Arena& arena_;
  Progress& progress_;
  std::unique_ptr<Reward> reward_;
  SamplingSettings sampled_;  // of training batches; the seed is that of the last sampling
};

Task task_of(const Options& options);

}  // namespace espalier
