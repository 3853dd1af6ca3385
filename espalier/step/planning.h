// What must be known before a step's first row runs: its plan, and how many bytes it may take.
#pragma once

#include <cstdint>
#include <span>

#include "espalier/options/options.h"
#include "espalier/plan/cost_model.h"
#include "espalier/plan/step_plan.h"
#include "espalier/rollout/rollout.h"

namespace espalier {

// Bytes the arena may grow to: --memory-budget, else what is free.
std::int64_t arena_limit(const Options& options);

// Weights, and gradients and optimizer state where `kind` has them.
std::int64_t bytes_of_model(const ModelShape& shape, const Options& options, const StepKind& kind);

// Refuses at once, before any weight is read, a model that --memory-budget cannot hold, or with gradients or optimizer
// state where `kind` has them; without a budget, one that what is free cannot hold. Errors: MemoryBudgetError.
void require_room(const ModelShape& shape, const Options& options, const StepKind& kind);

// The plan of one mini-batch: its prefix trees, and how the options and the machine say to run them.
StepPlan plan_step(const ModelShape& shape, const Options& options, const MachineProfile& machine,
                   std::span<const Rollout> batch, bool all_logprobs, const StepKind& kind);

}  // namespace espalier
