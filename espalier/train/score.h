// `score`: log-probs (and entropies) of recorded rollouts, forward only, every shared prompt run once.
#pragma once

#include <cstdint>

#include "espalier/observe/progress.h"
#include "espalier/options/options.h"

namespace espalier {

struct ScoreReport {
  std::int64_t rollouts = 0, tokens = 0;  // tokens: of responses, one log-prob each
  std::int64_t logical_rows = 0, physical_rows = 0;
  double seconds = 0;  // of the forward passes
};

// Writes the records of --rollouts to --out, in input order, with the field that --as names.
ScoreReport score(const Options& options, Progress& progress);

}  // namespace espalier
