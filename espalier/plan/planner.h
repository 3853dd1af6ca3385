// Plans a step from prefix trees: tries the schedules at a few budgets and takes the cheapest that fits.
#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "espalier/base/dtype.h"
#include "espalier/base/error.h"
#include "espalier/forecast/cost_model.h"
#include "espalier/grouping/prefix_tree.h"
#include "espalier/options/options.h"
#include "espalier/program/step_plan.h"

namespace espalier {

struct PlanOptions {
  Schedule schedule = Schedule::automatic;
  std::int64_t token_budget = 0;   // rows in one wave; 0: chosen. No set has more than max(2, budget) rows
  std::int64_t memory_budget = 0;  // bytes for everything held; 0: unlimited
  SavedState trunk_state = SavedState::automatic;  // automatic: kept; if that does not fit, the cheapest that does
  SavedState wave_state = SavedState::automatic;   // the same, but never offloaded
  // The path's layers. Automatic: in memory; if that does not fit, all layers are latents if the model allows it, or as
  // many unused layers as necessary are sharded over cp, or offloaded if trunks may be, whichever is cheapest. With one
  // rank of cp nothing is sharded.
  PathState path_state = PathState::automatic;
  std::int64_t spill_room = 0;  // the most bytes that an automatic state may offload
  DType dtype = DType::float32;
  bool all_logprobs = false;  // masked response tokens have edges too
  bool must_fit = true;       // false: a plan that does not fit is returned with its missing bytes
  bool remedies = true;       // false: no remedy for a plan that does not fit, which saves a few searches
  StepKind kind;
  StepSetting setting;
};

// A step does not fit its memory budget.
class StepTooLarge : public MemoryBudgetError {
 public:
  StepTooLarge(ErrorText text, std::int64_t needed_bytes) : MemoryBudgetError(std::move(text)), needed(needed_bytes) {}

  std::int64_t needed;  // the least sufficient budget
};

// Made from the options alone, with the traits of their device; the caller adds the kind and the held bytes of a step.
// Errors: OptionError for a --token-budget below 0 and for a --memory-budget that is 0 or cannot be parsed.
PlanOptions plan_options_of(const Options& options);

// The plan of one rank: `shape` is its part of the model. `trees` hold every rollout of the rank exactly once.
// `automatic` compares the modelled times of dense, packed, phased and a choice for each tree, and takes the fastest
// that fits the memory budget; it is never slower than dense. Without a token budget the waves are as small as fast
// matrix products allow (2,048 to 16,384 rows; up to four times that if a row goes to few of many experts, and eight
// times if every wave gathers sharded weights, provided that fewer waves save more than they cost), or as small as the
// memory budget requires. Time: O(rollouts + nodes) for each schedule and budget tried. Errors: with options.must_fit
// StepTooLarge (the least sufficient budget, and options that lower it); OptionError for a budget that cuts a path into
// thousands of trunks; UnsupportedError for --path-state latents of a model that cannot carry them.
StepPlan make_plan(std::span<const Rollout> rollouts, const std::vector<PrefixTree>& trees, const LocalShape& shape,
                   const PlanOptions& options, const MachineProfile& profile);

// The least memory budget within which a step fits, nearly always. `peak_within` plans within a budget and returns the
// plan's peak, which exceeds the budget if the plan does not fit. It is called, first with 1 byte and then with its own
// result, until a plan's peak is its budget, at most nine times.
std::int64_t least_budget(const std::function<std::int64_t(std::int64_t budget)>& peak_within);

// Remedy for a plan that does not fit: the sufficient budget `needed`, and the options that would lower it. `least`
// returns the least budget under changed options. Only options that lower the need are named.
std::string remedy_for(std::int64_t needed, const PlanOptions& options,
                       const std::function<std::int64_t(const PlanOptions& changed)>& least);

// The cost of make_plan under options.schedule alone, without the items. A budget that cuts a path into thousands of
// trunks counts as not fitting.
struct ScheduleCost {
  PlanCost cost;
  std::int64_t token_budget = 0;  // rows in one wave
};
ScheduleCost cost_of_schedule(std::span<const Rollout> rollouts, const std::vector<PrefixTree>& trees,
                              const ModelShape& shape, const PlanOptions& options, const MachineProfile& profile);

}  // namespace espalier
