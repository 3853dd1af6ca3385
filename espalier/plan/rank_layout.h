// One step on every rank of a layout: who runs which trees, what each rank holds in every phase, what it gives to the
// others and how long it waits.
//
// Every rank of dp has a plan of its own, made as the engine makes it: for its trees (plan/dealing.h), from what a rank
// has of the model (shape/local_shape.h). With pp a stage runs its layers of the plan; with cp a rank has 1 / cp of the
// rows of every set. Ranks of tp are alike.
//
//   seconds of a step  = most over dp of compute of the slowest stage + idle time + communication
//   balance            = mean / most of compute over ranks of dp
//   row balance        = most / mean of rows over ranks of dp
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
  std::span<const ModelShape> beside = {};  // other models that stand beside the step, held as options.setting says
};

// The ranks of one stage of one place on the axis of dp.
struct RankCost {
  std::int64_t dp = 0, pp = 0;
  std::int64_t trees = 0, rows = 0;
  PlanCost cost;            // seconds: compute alone; of the rank of cp with most
  double flops_of_all = 0;  // that all ranks of tp and cp run
  PlannedTraffic traffic;
  PathState path = PathState::keep;  // of layers that are not in use
};

// The work of a rank on an item that it does not leave to others: the whole item, or its share of the rows.
Work work_on(const PlanItem& item, const LocalShape& rank);

// A step on the ranks of one place on the axis of dp.
struct StepForecast {
  std::vector<RankCost> stages;
  double compute = 0, idle = 0, communication = 0;  // of the slowest stage each
  double seconds() const { return compute + idle + communication; }
};

// Forecast for the dp-th of the plans of all ranks of dp, dealt over cp; `rank`: the model's shape and the degrees.
StepForecast forecast(std::span<const StepPlan* const> plans, std::int64_t dp, std::span<const Rollout> rollouts,
                      const LocalShape& rank, const PlanOptions& options, const MachineProfile& profile);

struct LayoutPlan {
  Degrees degrees;
  Choice<Sharding> shard = Sharding::none;
  std::vector<RankCost> ranks;      // by dp, then pp
  std::vector<StepPlan> plans;      // of the ranks of dp, without what communication adds
  std::int64_t parameters = 0;      // of the rank with most
  std::int64_t trunk_forwards = 0;  // of prompts, in the whole world; those of a tree that is cut count in every part
  PhasePeaks bytes;                 // of the rank with most, phase by phase
  double seconds = 0, compute_seconds = 0, communication_seconds = 0;  // the last two of the slowest rank
  double balance = 1, bubble = 0;
  double row_balance = 1;          // rows of the rank of dp with most over the mean
  std::int64_t repeated_rows = 0;  // that several ranks of dp run because a tree is cut (plan/dealing.h)
  std::int64_t missing_bytes = 0;  // beyond the budget of one rank; 0: it fits
  bool fits() const { return missing_bytes == 0; }
};

enum class WhichRanks { all, busiest };  // of dp; the latter with a balance of 1 unknown

// problem.options for one rank of these degrees: what is shared, in flight and held beside the step.
PlanOptions options_of_rank(const LayoutProblem& problem, const Degrees& degrees);

// Errors: OptionError for degrees that do not divide the model; UnsupportedError for --shard optimizer where experts
// are spread over ranks of dp.
LayoutPlan plan_layout(const LayoutProblem& problem, const Degrees& degrees, WhichRanks which = WhichRanks::all);

// The same step on all ranks as one plan: items, trees and rows of all, seconds with communication and waiting, bytes
// of the rank with most; and beside it the other schedules on the same layout. Where it does not fit: how much is
// missing of one rank's budget, and what would help.
StepPlan step_on_ranks(const LayoutProblem& problem, const LayoutPlan& layout);

// The largest peak bytes of any rank and the step's seconds under problem.options.schedule alone, for the busiest rank
// of dp. As cost_of_schedule.
ScheduleCost cost_on_ranks(const LayoutProblem& problem, const Degrees& degrees);

Json to_json(const LayoutPlan& layout);
std::string explain(const LayoutPlan& layout);

}  // namespace espalier
