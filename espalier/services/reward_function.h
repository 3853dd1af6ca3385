// Rewards by compute_score of a Python file, in a process of its own that stays (docs/rewards.md).
#pragma once

#include <optional>
#include <span>
#include <string>
#include <vector>

#include "espalier/metrics/progress.h"
#include "espalier/rollout/rollout.h"
#include "espalier/services/python_service.h"

namespace espalier {

struct Score {
  std::optional<double> score;     // none: the function returned None, so the response was not judged
  std::optional<double> accuracy;  // `acc` of a dict
  std::string extra;               // JSON object text of a dict's other members; empty: none
};

class RewardFunction {
 public:
  // Imports the file. A call may take `timeout` seconds. Errors: InputError naming what the file lacks, with Python's
  // message and the line where it was raised.
  RewardFunction(const std::string& file, double timeout);
  RewardFunction(const RewardFunction&) = delete;  // its service reports errors to it
  RewardFunction& operator=(const RewardFunction&) = delete;

  // Scores of responses, in order. The function is told what the records carry (services/rollout_text.h):
  // `data_source`, `response`, `ground_truth` (else that of `reward_model`), each null where absent, and `extra_info`
  // with, where it has no such members itself, "prompt", "ended" (by a stop token) and "tokens". A process that dies is
  // started again once. Errors: InputError with Python's message for an exception, what is no finite number, no answer
  // in time, and a process that dies twice at the same response.
  std::vector<Score> of(std::span<const Rollout> rollouts, Progress& progress);

 private:
  [[noreturn]] void fail(const Json& error, std::size_t place) const;
  std::string about(std::size_t place) const;

  std::string file_;
  std::span<const Rollout> asked_;  // while of() runs
  PythonService service_;
};

// The mean over the judged responses; none where no response was judged.
std::optional<double> mean_score(std::span<const Score> scores);

// A note for the user on responses that were not judged; "" if all were.
std::string unjudged_note(std::int64_t unjudged, std::int64_t responses);

// Sets `reward` of judged responses, and carries a dict's other members as `reward_extra_info`.
void add_scores(std::vector<Rollout>& rollouts, std::span<const Score> scores);

}  // namespace espalier
