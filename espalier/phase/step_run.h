// What the phases of one step share: the model, the path, the gradients, and the log-probs gathered so far.
#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <vector>

#include "espalier/gradient/gradient_set.h"
#include "espalier/model/decoder.h"
#include "espalier/objective/objective.h"
#include "espalier/observe/arena.h"
#include "espalier/plan/step_plan.h"
#include "espalier/rollout/rollout.h"

namespace espalier {

// Series of one rollout, one value per response token.
struct RolloutSeries {
  std::vector<double> logprob, entropy;            // NaN where no log-prob was asked for
  std::vector<double> grad_logprob, grad_entropy;  // dL/d...; kept only for sequence-level objectives
};

struct PhaseSeconds {
  double trunk_forward = 0, waves = 0, trunk_backward = 0;
};

struct StepRun {
  const Decoder& decoder;
  std::span<const Rollout> batch;
  KvPath& path;
  Arena& arena;
  Objective* objective = nullptr;             // null: forward only
  GradientSet* gradients = nullptr;           // null: forward only
  bool all_logprobs = false;                  // masked tokens too
  moe::LoadAccounting* accounting = nullptr;  // router losses; null: none
  bool counts_only = false;                   // forward only, for the routers' choices: no log-probs

  std::vector<RolloutSeries> series = {};  // one per rollout of the batch
  std::int64_t trunk_rows = 0, wave_rows = 0, trunk_forwards = 0;
  std::function<void(std::int64_t rows_done)> on_rows = {};  // called after every item, for progress; may be empty
  PhaseSeconds seconds = {};
  PhasePeaks arena_bytes = {};  // high-water mark of the arena in each phase
  Timer* timer = nullptr;       // books the parts of a step; may be null

  bool trains() const { return objective != nullptr; }
};

}  // namespace espalier
