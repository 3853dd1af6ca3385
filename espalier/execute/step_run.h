// State common to the phases of one step: the model, its head, the path and the gradients.
#pragma once

#include <cstdint>
#include <functional>
#include <span>

#include "espalier/device/arena.h"
#include "espalier/execute/head.h"
#include "espalier/gradient/gradient_set.h"
#include "espalier/model/chosen_experts.h"
#include "espalier/model/decoder.h"
#include "espalier/model/open_path.h"
#include "espalier/program/step_plan.h"
#include "espalier/rollout/rollout.h"
#include "espalier/saved/spill_queue.h"

namespace espalier {

struct PhaseSeconds {
  double trunk_forward = 0, waves = 0, trunk_backward = 0;
  double waiting = 0;  // of these, waiting for neighbouring stages of pp
};

// State common to all items of one run.
struct StepRun {
  const Decoder& decoder;
  std::span<const Rollout> rollouts;
  OpenPath& path;
  Arena& arena;
  Head* head = nullptr;                       // null: the decoder runs alone, for its routers' choices
  GradientSet* gradients = nullptr;           // null: forward only
  bool all_logprobs = false;                  // masked tokens too
  moe::LoadAccounting* accounting = nullptr;  // router losses; null: none
  moe::ChoiceRecord choices = {};             // routers' choices to record or to replay

  std::function<void(std::int64_t rows_done)> on_rows = {};  // called after every item to report progress; may be empty
  Timer* timer = nullptr;                                    // times the parts of a step; may be null
  SpillQueue* spill = nullptr;                               // holds offloaded trunks; null if the plan has none

  bool trains() const { return gradients != nullptr; }
};

// Counts and measurements of a run.
struct RunResult {
  std::int64_t trunk_rows = 0, wave_rows = 0, trunk_forwards = 0;
  PhaseSeconds seconds;
  PhasePeaks arena_bytes;                                   // high-water mark of the arena in each phase
  TrafficBytes bytes;                                       // sent by this rank to others, without the reduction
  double last_backward_began = 0, last_backward_ended = 0;  // Timer::steady_seconds; 0 without a backward
};

}  // namespace espalier
