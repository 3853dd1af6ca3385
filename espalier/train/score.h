// `score`: log-probs (and entropies) of recorded rollouts, forward only, every shared prompt run once.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "espalier/observe/arena.h"
#include "espalier/observe/progress.h"
#include "espalier/options/options.h"
#include "espalier/phase/step_run.h"
#include "espalier/plan/cost_model.h"

namespace espalier {

struct ScoreReport {
  std::int64_t rollouts = 0, tokens = 0;  // tokens: of responses, one log-prob each
  std::int64_t logical_rows = 0, physical_rows = 0;
  double seconds = 0;  // of the forward passes
};

struct ScoredRollouts {
  std::vector<RolloutSeries> series;  // one per rollout; log-probs and entropies of all response tokens
  std::int64_t logical_rows = 0, physical_rows = 0;
  double seconds = 0;  // plan and forward passes
};

// Log-probs and entropies of the rollouts under `decoder`, whose rotary tables must cover them.
ScoredRollouts score_rollouts(const Decoder& decoder, std::span<const Rollout> rollouts, const Options& options,
                              const MachineProfile& machine, Arena& arena, Progress& progress);

// Writes the records of --rollouts to --out, in input order, with the field that --as names.
ScoreReport score(const Options& options, Progress& progress);

}  // namespace espalier
