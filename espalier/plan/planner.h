// From prefix trees to a step: tries the schedules at a few budgets and takes the cheapest that fits.
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
  SavedState trunk_state = SavedState::automatic;  // automatic: kept; where that does not fit, the cheapest that does
  SavedState wave_state = SavedState::automatic;   // the same, but never offloaded
  // The path's layers: automatic: in memory; where that does not fit, while they are not in use as many as must be
  // sharded over cp, or offloaded where trunks may be, whichever is cheaper. On one rank of cp nothing
  // is divided.
  PathState path_state = PathState::automatic;
  std::int64_t spill_room = 0;  // bytes that may be offloaded unasked
  DType dtype = DType::float32;
  bool all_logprobs = false;  // masked response tokens have edges too
  bool must_fit = true;       // false: what does not fit is planned all the same, and says what is missing
  bool remedies = true;       // false: what does not fit says so and no more, which saves a few searches
  StepKind kind;
  StepSetting setting;
};

// A step that its memory budget cannot hold.
class StepTooLarge : public MemoryBudgetError {
 public:
  StepTooLarge(ErrorText text, std::int64_t needed_bytes) : MemoryBudgetError(std::move(text)), needed(needed_bytes) {}

  std::int64_t needed;  // the least budget that would do
};

// From the options alone, with the traits of their device; kind and holdings of a step are the caller's. Errors:
// OptionError for values it cannot read.
PlanOptions plan_options_of(const Options& options);

// The plan of one rank: `shape` is its part of the model. `trees` hold every rollout of the rank exactly once.
// `automatic` takes, of the modelled times of dense, packed,
// phased and the mixture made tree by tree, the least that fits the memory budget: it is never above dense.
// Without a token budget the waves are as small as the machine's fast matrix products allow (2,048 to 16,384 rows; up
// to four times that where a row goes to few of many experts, and eight times where every wave brings divided weights
// together, if fewer waves save more than they cost), or what fits the memory budget. Time: O(rollouts +
// nodes) per schedule and budget tried. Errors: StepTooLarge (how much is needed at least, what would lower it),
// OptionError (a budget that cuts a path into thousands of trunks).
StepPlan make_plan(std::span<const Rollout> rollouts, const std::vector<PrefixTree>& trees, const LocalShape& shape,
                   const PlanOptions& options, const MachineProfile& profile);

// The least memory budget within which something fits: `peak_within` plans it within a budget and returns the peak,
// which is above the budget where it does not fit. The same whatever budget was asked for, and checked: it fits there.
std::int64_t least_budget(const std::function<std::int64_t(std::int64_t budget)>& peak_within);

// Remedy for a plan that does not fit: the budget that would do, and the options that would lower it. `least`: the
// least budget under given options. Only options that lower the need are named.
std::string remedy_for(std::int64_t needed, const PlanOptions& options,
                       const std::function<std::int64_t(const PlanOptions& changed)>& least);

// The result of make_plan under options.schedule alone, without the items. A budget that cuts a path into thousands
// of trunks does not fit.
struct ScheduleCost {
  PlanCost cost;
  std::int64_t token_budget = 0;  // rows in one wave
};
ScheduleCost cost_of_schedule(std::span<const Rollout> rollouts, const std::vector<PrefixTree>& trees,
                              const ModelShape& shape, const PlanOptions& options, const MachineProfile& profile);

}  // namespace espalier
