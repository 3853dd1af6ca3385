// The routers of one step: their losses and loads, and the counting pass that a loss over the mini-batch needs.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "espalier/model/decoder.h"
#include "espalier/moe/load_accounting.h"
#include "espalier/observe/arena.h"
#include "espalier/options/options.h"
#include "espalier/plan/step_plan.h"
#include "espalier/rollout/rollout.h"

namespace espalier {

// Losses and loads of the routers, where a router loss is on; a shared token counts once per rollout.
struct RouterReport {
  double aux_loss = 0, z_loss = 0;              // before their coefficients, layers summed
  double weighted_loss = 0;                     // what they add to the step's loss
  double counting_seconds = 0;                  // of the counting pass
  bool counting_pass = false;                   // a forward pass counted the choices first
  std::vector<std::vector<std::int64_t>> load;  // choices of every expert, by layer; empty: a dense layer
};

class RouterStep {
 public:
  // Without a router loss in the options it has no accounting and does nothing. Errors: OptionError for a router loss
  // of a model without routers.
  RouterStep(const Decoder& decoder, std::span<const Rollout> batch, const Options& options);

  // One forward of the plan for the routers' choices alone, where a loss needs them before any backward.
  void count_choices(const StepPlan& plan, Arena& arena);

  moe::LoadAccounting* accounting() { return accounting_ ? &*accounting_ : nullptr; }
  RouterReport report() const;

 private:
  const Decoder& decoder_;
  std::span<const Rollout> batch_;
  std::optional<moe::LoadAccounting> accounting_;
  double counting_seconds_ = 0;
};

}  // namespace espalier
