// Planning before a step's first row runs: its plan, and the bytes that it may take.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "espalier/forecast/cost_model.h"
#include "espalier/options/options.h"
#include "espalier/parallel/mesh.h"
#include "espalier/plan/planner.h"
#include "espalier/program/step_plan.h"
#include "espalier/rollout/rollout.h"
#include "espalier/step/held_models.h"

namespace espalier {

// Bytes the arena may grow to: --memory-budget, else what is free.
std::int64_t arena_limit(const Options& options);

// The plan of this rank's part of one mini-batch: prefix trees, dealt to the ranks of dp, and how the options and
// the machine say to run them. A rank may have none. Without a memory budget it is made for the rank with least room,
// so that all plan alike. With several ranks the chosen cost is: seconds with communication and waiting, bytes of this
// rank's stage, FLOPs of all ranks that share its trees. Errors: CommunicationError where ranks of one part plan
// differently.
StepPlan plan_step(const LocalShape& shape, const Options& options, const MachineProfile& machine,
                   std::span<const Rollout> rollouts, bool all_logprobs, const StepKind& kind, const HeldState& held,
                   const Mesh& mesh = mesh_of_one());

// Refuses at once, before any weight is read, steps that the budget, or without one what is free, cannot hold: with
// what the largest of them needs, so that the number that is named is enough for all.
class StepsFit {
 public:
  // One step of each of the models on these rollouts. Every rank calls it. Errors: those of plan_step but for memory.
  void add(std::span<const HeldModel> held, const Options& options, const MachineProfile& machine,
           std::span<const Rollout> rollouts, bool all_logprobs, const Mesh& mesh);
  // Errors: StepTooLarge.
  void require() const;

 private:
  std::optional<StepTooLarge> worst_;
};

}  // namespace espalier
