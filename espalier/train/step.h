// One optimizer step: records -> prefix trees -> plan -> schedule -> gradients -> AdamW (docs/architecture.md).
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "espalier/gradient/gradient_set.h"
#include "espalier/objective/objective.h"
#include "espalier/observe/arena.h"
#include "espalier/optimizer/adamw.h"
#include "espalier/phase/step_run.h"
#include "espalier/plan/cost_model.h"
#include "espalier/plan/step_plan.h"
#include "espalier/train/model_state.h"
#include "espalier/train/router_step.h"
#include "espalier/train/step_profile.h"
#include "espalier/train/training_data.h"

namespace espalier {

// What steps work on and what outlives them.
struct Actor {
  Actor(ModelState& model_state, const Options& run_options, const MachineProfile& machine_profile);

  ModelState& model;
  Options options;
  MachineProfile machine;
  GradientSet gradients;
  Arena arena;
  bool has_optimizer = false;                       // its state is held beside all this; run_step says so
  std::function<void(double share)> on_share = {};  // told the share of a step's rows that have run; may be empty
};

struct StepSeconds {
  double total = 0, plan = 0, counting = 0, optimizer = 0;
  PhaseSeconds phases;
};

struct GradientReport {
  LossParts loss;  // loss: with the router losses
  RouterReport router;
  StepPlan plan;
  std::int64_t trunk_rows = 0, wave_rows = 0, trunk_forwards = 0;
  std::vector<RolloutSeries> series;  // per rollout of the mini-batch
  PhasePeaks peak_bytes;              // measured: everything held, plus the arena's high-water mark in each phase
  PhasePeaks arena_bytes;             // measured: the high-water marks alone
  StepSeconds seconds;
  std::optional<StepProfile> profile;  // with --profile
};

struct StepReport {
  std::int64_t step = 0;  // from 1
  GradientReport gradient;
  AdamW::Update update;
};

// Overwrites actor.gradients with the gradient of the mini-batch's loss. `all_logprobs`: masked tokens' log-probs too.
GradientReport compute_gradient(Actor& actor, const MiniBatch& batch, bool all_logprobs);

StepReport run_step(Actor& actor, AdamW& optimizer, const MiniBatch& batch, bool all_logprobs);

}  // namespace espalier
