// `score`: log-probs (and entropies) of recorded rollouts, forward only, every shared prompt run once.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "espalier/execute/language_head.h"
#include "espalier/forecast/cost_model.h"
#include "espalier/metrics/progress.h"
#include "espalier/options/options.h"
#include "espalier/parallel/mesh.h"
#include "espalier/rollout/reader.h"
#include "espalier/step/workspace.h"

namespace espalier {

struct ScoreReport {
  std::int64_t rollouts = 0, tokens = 0;  // tokens: of responses, one log-prob each
  bool scores = false;                    // of a reward model: one number a response, no log-probs
  std::int64_t logical_rows = 0, physical_rows = 0;
  double seconds = 0;  // of the forward passes, the critic's too
};

struct ScoredRollouts {
  std::vector<RolloutSeries> series;  // one per rollout; log-probs and entropies of all response tokens
  std::int64_t logical_rows = 0, physical_rows = 0;
  double seconds = 0;  // plan and forward passes
};

// Log-probs and entropies of the rollouts under `decoder`, whose rotary tables must cover them. `counts` (may be null)
// gets the choices of its routers, as in ScoredChoices::counts, for these rollouts in this order; with it every row
// runs through a last block of experts.
ScoredRollouts score_rollouts(const Decoder& decoder, std::span<const Rollout> rollouts, const Options& options,
                              const MachineProfile& machine, Workspace& workspace, Progress& progress,
                              moe::LoadAccounting* counts = nullptr, const Mesh& mesh = mesh_of_one());

// The way `score` reads rows of text: as a reward model's data, or not at all for a language model.
TextRows scored_rows(const Options& options);

// Writes the records of --rollouts to --out, in input order, with the field that --as names; with --critic and --values
// the critic's `values` too. A reward model (...ForSequenceClassification) gives every response its `reward` instead;
// of pairs and lists every answer becomes a record. Every rank scores its part, rank 0 writes.
ScoreReport score(const Options& options, Progress& progress, const Mesh& mesh = mesh_of_one());

}  // namespace espalier
