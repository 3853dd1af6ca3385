// One step on every rank of a layout: the trees of each rank, its held bytes in every phase, the bytes that it sends,
// and its waiting time.
//
// Every rank of dp has its own plan, made as in a run: for its trees (plan/dealing.h) and its part of the model
// (shape/local_shape.h). With pp a stage runs its layers of the plan; with cp a rank has 1 / cp of the rows of every
// sharded set, and whole waves that are dealt to it. Ranks of tp are identical.
//
//   seconds of a step  = maximum over dp of (compute of the slowest stage + idle time + communication)
//   balance            = mean / maximum of compute over ranks of dp
//   row balance        = maximum / mean of rows over ranks of dp
//   bubble             = idle share of a stage (forecast/pipeline_time.h), over the trees and the waves without a trunk
#pragma once

#include <span>
#include <string>
#include <vector>

#include "espalier/forecast/communication.h"
#include "espalier/plan/planner.h"

namespace espalier {

struct LayoutProblem {
  std::span<const Rollout> rollouts;
  const std::vector<PrefixTree>& trees;
  const ModelShape& shape;
  PlanOptions options;  // memory_budget: of one rank; must_fit is not read
  const MachineProfile& profile;
  Choice<Sharding> shard = Sharding::none;
  std::span<const ModelShape> beside = {};  // other models held beside the step, as in options.setting
};

// The ranks of one stage at one position of dp.
struct RankCost {
  std::int64_t dp = 0, pp = 0;
  std::int64_t trees = 0, rows = 0;
  PlanCost cost;            // seconds: compute only, of the slowest rank of cp
  double flops_of_all = 0;  // summed over the ranks of tp and cp
  PlannedTraffic traffic;
  PathState path = PathState::keep;  // of layers not in use
};

// The work of a rank on an item that it takes part in: the whole item, or its share of the rows.
Work work_on(const PlanItem& item, const LocalShape& rank);

// A step on the ranks at one position of dp.
struct StepForecast {
  std::vector<RankCost> stages;
  double compute = 0, idle = 0, communication = 0;  // each: of the slowest stage
  double seconds() const { return compute + idle + communication; }
};

// The forecast for plan `dp` among the plans of dp, dealt over cp; `rank`: the model's shape and the degrees.
StepForecast forecast(std::span<const StepPlan* const> plans, std::int64_t dp, std::span<const Rollout> rollouts,
                      const LocalShape& rank, const PlanOptions& options, const MachineProfile& profile);

struct LayoutPlan {
  Degrees degrees;
  Choice<Sharding> shard = Sharding::none;
  std::vector<RankCost> ranks;          // by dp, then pp
  std::vector<StepPlan> plans;          // of the ranks of dp, without the cost of communication
  std::int64_t parameters = 0;          // maximum over ranks
  std::int64_t trunk_forwards = 0;      // of prompts, over all ranks; prompts of a cut tree count in every part
  PhasePeaks bytes;                     // maximum over ranks, by phase
  std::int64_t communicator_bytes = 0;  // of each rank's peak (forecast/communicators.h)
  double seconds = 0, compute_seconds = 0, communication_seconds = 0;  // the last two are the slowest rank's
  double balance = 1, bubble = 0;
  double row_balance = 1;          // maximum over mean of the rows of a rank of dp
  std::int64_t repeated_rows = 0;  // run by several ranks of dp because a tree is cut (plan/dealing.h)
  std::int64_t missing_bytes = 0;  // beyond the budget of one rank; 0: it fits
  bool fits() const { return missing_bytes == 0; }
};

enum class WhichRanks { all, busiest };  // ranks of dp to plan; with `busiest` the balance is unknown and reported as 1

// problem.options for one rank of these degrees: sharing, waves in flight, and bytes held beside the step.
PlanOptions options_of_rank(const LayoutProblem& problem, const Degrees& degrees);

// Errors: OptionError for degrees that do not divide the model; UnsupportedError for --shard optimizer if experts are
// spread over dp.
LayoutPlan plan_layout(const LayoutProblem& problem, const Degrees& degrees, WhichRanks which = WhichRanks::all);

// The step on all ranks as one plan: items, trees and rows of all ranks, seconds with communication and waiting,
// maximum bytes of a rank; and the other schedules on the same layout. If it does not fit: the bytes missing in one
// rank's budget, and a remedy.
StepPlan step_on_ranks(const LayoutProblem& problem, const LayoutPlan& layout);

// Peak bytes of any rank and seconds of the step under problem.options.schedule alone, for the busiest rank of dp. See
// cost_of_schedule.
ScheduleCost cost_on_ranks(const LayoutProblem& problem, const Degrees& degrees);

Json to_json(const LayoutPlan& layout);
std::string explain(const LayoutPlan& layout);

}  // namespace espalier
