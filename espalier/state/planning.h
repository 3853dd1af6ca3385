// Planning before a step's first row runs: the plan, and the bytes that it may use.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "espalier/forecast/cost_model.h"
#include "espalier/options/memory_budget.h"
#include "espalier/options/options.h"
#include "espalier/parallel/mesh.h"
#include "espalier/plan/planner.h"
#include "espalier/program/step_plan.h"
#include "espalier/rollout/rollout.h"
#include "espalier/state/held_models.h"

namespace espalier {

// The budget of this process: --memory-budget, or what the bound device held and had free at the first call. Processes
// of one machine that share its memory: `local_ranks`; they keep the number of the first call.
Budget budget_of(const Options& options, int local_ranks = 1);

// The traits of the bound device, with the attention kernels of its profile. An emulated GPU has its memory in this
// process and counts as a CPU.
DeviceTraits bound_traits(const Options& options, const MachineProfile& machine);

// Bytes of activations for `rows` rows at once that a sampler runs.
std::int64_t sampling_bytes(const LocalShape& shape, DType dtype, std::int64_t rows);

// The plan of this rank's part of one mini-batch: its prefix trees, dealt over dp, run as the options and the machine
// require. A rank may have no trees. Without a memory budget all ranks plan for the rank with the least free memory, so
// that their plans agree. With several ranks the chosen cost has seconds that include communication and waiting, the
// bytes of this rank's stage, and the FLOPs of all ranks that share its trees. Errors: as make_plan; CommunicationError
// if ranks deal the trees differently, or if ranks with the same trees plan differently.
StepPlan plan_step(const LocalShape& shape, const Options& options, const MachineProfile& machine,
                   std::span<const Rollout> rollouts, bool all_logprobs, const StepKind& kind, const HeldState& held,
                   const Mesh& mesh = mesh_of_one());

// Refuses steps that do not fit the budget, or without a budget the free memory, before any weight is read. The message
// gives the bytes that the largest step needs: a budget of that size is enough for all steps.
class StepsFit {
 public:
  // Adds a step of each model on these rollouts. Every rank calls it. Errors: as plan_step except for memory.
  void add(std::span<const HeldModel> held, const Options& options, const MachineProfile& machine,
           std::span<const Rollout> rollouts, bool all_logprobs, const Mesh& mesh);
  bool fits() const { return !worst_; }
  // Errors: StepTooLarge.
  void require() const;

 private:
  std::optional<StepTooLarge> worst_;
};

}  // namespace espalier
