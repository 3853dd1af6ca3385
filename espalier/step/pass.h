// One walk over a plan: forward only, or with gradients. The same for an actor and for a critic; what differs is the
// head on top of the decoder (phase/head.h).
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <string_view>
#include <vector>

#include "espalier/device/arena.h"
#include "espalier/forecast/cost_model.h"
#include "espalier/gradient/gradient_set.h"
#include "espalier/measure/step_profile.h"
#include "espalier/observe/progress.h"
#include "espalier/observe/timer.h"
#include "espalier/optimizer/adamw.h"
#include "espalier/options/options.h"
#include "espalier/phase/step_run.h"
#include "espalier/program/step_plan.h"
#include "espalier/step/held_models.h"
#include "espalier/step/model_state.h"
#include "espalier/step/router_step.h"
#include "espalier/step/workspace.h"

namespace espalier {

// A model that is trained: what its steps work on and what outlives them. Learners whose steps take turns share one
// workspace.
struct Learner : Holder {
  Learner(ModelState& model_state, const Options& run_options, const MachineProfile& machine_profile, Workspace& shared,
          AdamW* its_optimizer = nullptr);

  // Weights and gradients, and the optimizer's state where there is one.
  HeldModel held() const;
  std::int64_t held_bytes() const override { return held().bytes(model.dtype); }

  ModelState& model;
  Options options;
  MachineProfile machine;
  GradientSet gradients;
  Workspace& workspace;
  AdamW* optimizer;                                 // null: gradients alone are computed
  moe::ChoiceRecord choices = {};                   // what the steps do with the choices of routers
  std::function<void(double share)> on_share = {};  // told the share of a step's rows that have run; may be empty
};

struct StepSeconds {
  double total = 0, plan = 0, counting = 0, communication = 0, optimizer = 0;
  PhaseSeconds phases;
};

// Over all ranks: rows are summed, bytes and seconds are the largest of any rank. `plan`: this rank's items and
// trees.
struct PassReport {
  StepPlan plan;
  std::vector<Schedule> schedules;  // that any tree ran under, each once
  std::int64_t trunk_rows = 0, wave_rows = 0, trunk_forwards = 0;
  PhasePeaks peak_bytes;   // measured: everything held, plus the arena's high-water mark in each phase
  PhasePeaks arena_bytes;  // measured: the high-water marks alone
  double idle_share = 0;   // measured: of the time of the stages of pp, without work
  StepSeconds seconds;
  TrafficBytes bytes;                  // that this rank gave to others
  std::optional<StepProfile> profile;  // with --profile

  // Books the update that followed.
  void add_update(const AdamW::Update& update);
};

// Overwrites learner.gradients with the gradient of what the head computes, summed over ranks. `routers` may be null.
// `all_tokens`: the head scores masked tokens too. `timer` began where the report's seconds begin.
PassReport run_gradient_pass(Learner& learner, std::span<const Rollout> rollouts, Head& head, RouterStep* routers,
                             bool all_tokens, Timer& timer);

// Moves the weights by learner.gradients. There must be an optimizer.
AdamW::Update update_weights(Learner& learner);

struct ForwardPass {
  const Decoder& decoder;  // its rotary tables must cover the rollouts
  std::span<const Rollout> rollouts;
  const Options& options;
  const MachineProfile& machine;
  Workspace& workspace;
  Progress& progress;
  std::string_view task;                  // what progress calls it
  moe::LoadAccounting* counts = nullptr;  // gets the choices of the routers; may be null
  const Mesh& mesh = mesh_of_one();
};

struct ForwardReport {
  std::int64_t logical_rows = 0, physical_rows = 0;  // of all ranks
  double seconds = 0;                                // plan and forward passes
};

// All response tokens, masked ones too.
ForwardReport run_forward_pass(const ForwardPass& pass, Head& head);

}  // namespace espalier
