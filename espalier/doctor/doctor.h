// `doctor`: which known faults a dump shows, with the rows that prove it.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "espalier/doctor/finding.h"
#include "espalier/metrics/progress.h"
#include "espalier/options/options.h"
#include "espalier/rollout/rollout.h"

namespace espalier {

struct Diagnosis {
  std::vector<Rollout> rollouts;
  std::vector<Finding> findings;
  std::int64_t replayed = 0, replayed_tokens = 0;  // rollouts of the sample, and their response tokens
};

// Reads `paths`, in any format that is read. With --model it also replays rollouts of --sample response tokens, spread
// over the dump, and reads histories with the model's tokenizer. Errors: from reading and from the model.
Diagnosis diagnose(const std::vector<std::string>& paths, const Options& options, Progress& progress);

}  // namespace espalier
