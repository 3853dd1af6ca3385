// The routers of one step: losses, loads, and the counting pass that a loss over the mini-batch needs.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string_view>
#include <vector>

#include "espalier/device/arena.h"
#include "espalier/model/chosen_experts.h"
#include "espalier/model/load_accounting.h"
#include "espalier/options/options.h"
#include "espalier/program/step_plan.h"
#include "espalier/rollout/rollout.h"
#include "espalier/state/model_state.h"

namespace espalier {

// Choices counted while rollouts were scored, for a loss over a mini-batch of them at the same weights.
struct ScoredChoices {
  // Starts with no counts. `model` must have experts.
  ScoredChoices(const ModelState& model, std::span<const Rollout> rollouts);

  moe::LoadAccounting counts;
  std::vector<std::int64_t> index;  // Rollout::index of each rollout counted
  std::int64_t updates;             // ModelState::updates of the weights
};

// Losses and loads of the routers of a model with experts; a shared token counts once per rollout.
struct RouterReport {
  double aux_loss = 0, z_loss = 0;  // before their coefficients, layers summed
  double weighted_loss = 0;         // their addition to the step's loss
  std::string_view counts;          // "update pass", "counting pass", "score pass"; empty: no experts
  // The number of choices of every expert, by layer. Empty for a dense layer. Also empty for the last layer without a
  // router loss: that layer runs output rows only, and counting the other rows would cost a pass through it.
  std::vector<std::vector<std::int64_t>> load;
};

class RouterStep {
 public:
  // Does nothing for models without experts. `scored` (may be null) is used if a loss needs counts before any backward,
  // the weights have not changed since, and every rollout was counted. Errors: OptionError for a router loss of a model
  // without routers, or of one whose routers score by sigmoids.
  RouterStep(const ModelState& model, std::span<const Rollout> rollouts, const Options& options,
             const ScoredChoices* scored = nullptr);

  bool took_counts() const { return took_counts_; }  // the counts of `scored` were used

  // Runs the plan forward for the routers' choices only, if a loss needs them before any backward. `choices`: as in the
  // pass that follows.
  void count_choices(const StepPlan& plan, Arena& arena, const moe::ChoiceRecord& choices);

  moe::LoadAccounting* accounting() { return accounting_ ? &*accounting_ : nullptr; }
  // Summed over all ranks.
  RouterReport report() const;

 private:
  const Decoder& decoder_;
  std::span<const Rollout> rollouts_;
  std::string spill_dir_;
  std::optional<moe::LoadAccounting> accounting_;
  bool took_counts_ = false;
};

}  // namespace espalier
