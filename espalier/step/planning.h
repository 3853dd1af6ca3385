// What must be known before a step's first row runs: its plan, and how many bytes it may take.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "espalier/options/options.h"
#include "espalier/parallel/mesh.h"
#include "espalier/plan/cost_model.h"
#include "espalier/plan/step_plan.h"
#include "espalier/rollout/rollout.h"

namespace espalier {

// Bytes the arena may grow to: --memory-budget, else what is free.
std::int64_t arena_limit(const Options& options);

// The plan of this rank's part of one mini-batch: prefix trees, dealt to the ranks of dp, and how the options and
// the machine say to run them. A rank may have none. Without a memory budget it is made for the rank with least room,
// so that all plan alike. Of several ranks the chosen cost is: seconds with communication and waiting, bytes of this
// rank's stage, FLOPs of all ranks that share its trees. Errors: CommunicationError where ranks of one part plan
// differently.
StepPlan plan_step(const LocalShape& shape, const Options& options, const MachineProfile& machine,
                   std::span<const Rollout> rollouts, bool all_logprobs, const StepKind& kind,
                   const Mesh& mesh = mesh_of_one());

}  // namespace espalier
