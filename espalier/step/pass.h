// One pass over a plan, forward only or with gradients. Actor and critic share this code; they differ in the head on
// top of the decoder (execute/head.h).
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <string_view>
#include <vector>

#include "espalier/device/arena.h"
#include "espalier/execute/step_run.h"
#include "espalier/forecast/cost_model.h"
#include "espalier/gradient/gradient_set.h"
#include "espalier/measure/step_profile.h"
#include "espalier/metrics/progress.h"
#include "espalier/metrics/timer.h"
#include "espalier/optimizer/adamw.h"
#include "espalier/options/options.h"
#include "espalier/program/step_plan.h"
#include "espalier/state/held_models.h"
#include "espalier/state/model_state.h"
#include "espalier/step/router_step.h"
#include "espalier/step/workspace.h"

namespace espalier {

// A trained model: the state that its steps read and write. Learners whose steps take turns share one
// workspace.
struct Learner : Holder {
  Learner(ModelState& model_state, const Options& run_options, const MachineProfile& machine_profile, Workspace& shared,
          AdamW* its_optimizer = nullptr);

  // Weights and gradients, and the optimizer's state if there is one.
  HeldModel held() const;
  std::int64_t held_bytes() const override { return held().bytes(model.dtype); }

  ModelState& model;
  Options options;
  MachineProfile machine;
  GradientSet gradients;
  Workspace& workspace;
  AdamW* optimizer;                                   // null: only gradients are computed
  moe::ChoiceRecord choices = {};                     // routers' choices to record or to replay
  std::function<void(const StepPlan&)> on_plan = {};  // receives the plan before its first row runs; may be empty
  std::function<void(double share)> on_share = {};    // receives the fraction of rows that have run; may be empty
};

struct StepSeconds {
  double total = 0, plan = 0, counting = 0, communication = 0, optimizer = 0;
  PhaseSeconds phases;
};

// Over all ranks: rows are summed, bytes and seconds are the maximum. `plan`: this rank's items and
// trees.
struct PassReport {
  StepPlan plan;
  std::vector<Schedule> schedules;  // the schedules of all trees, each once
  std::int64_t trunk_rows = 0, wave_rows = 0, trunk_forwards = 0;
  PhasePeaks peak_bytes;   // measured: all held bytes plus the arena's high-water mark, by phase
  PhasePeaks arena_bytes;  // measured: the high-water marks only
  double idle_share = 0;   // measured: fraction of the pp stages' time without work
  StepSeconds seconds;
  TrafficBytes bytes;                  // sent by this rank to others
  std::optional<StepProfile> profile;  // with --profile

  // Adds the optimizer update that followed the pass.
  void add_update(const AdamW::Update& update);
};

// Overwrites learner.gradients with the gradient of the head's loss, summed over ranks. `routers` may be null.
// `all_tokens`: the head scores masked tokens too. The report's seconds count from the start of `timer`.
PassReport run_gradient_pass(Learner& learner, std::span<const Rollout> rollouts, Head& head, RouterStep* routers,
                             bool all_tokens, Timer& timer);

// Updates the weights by learner.gradients. Requires an optimizer.
AdamW::Update update_weights(Learner& learner);

struct ForwardPass {
  const Decoder& decoder;  // its rotary tables must cover the rollouts
  std::span<const Rollout> rollouts;
  const Options& options;
  const MachineProfile& machine;
  Workspace& workspace;
  Progress& progress;
  std::string_view task;                  // its name in progress reports
  moe::LoadAccounting* counts = nullptr;  // counts the routers' choices; may be null
  const Mesh& mesh = mesh_of_one();
  std::function<void(const StepPlan&)> on_plan = {};  // receives the plan before its first row runs; may be empty
};

struct ForwardReport {
  std::int64_t logical_rows = 0, physical_rows = 0;  // summed over all ranks
  double seconds = 0;                                // plan and forward passes
};

// Scores all response tokens, masked ones included.
ForwardReport run_forward_pass(const ForwardPass& pass, Head& head);

}  // namespace espalier
