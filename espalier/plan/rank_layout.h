// One step on every rank of a layout: who runs which trees, what each rank holds in every phase, what it gives to the
// others and how long it waits.
//
// Every rank of dp has a plan of its own, made as the engine makes it: for its trees (plan/dealing.h), from what a rank
// has of the model (plan/local_shape.h). With pp a stage runs its layers of the plan; with cp a rank has 1 / cp of the
// rows of every set. Ranks of tp are alike.
//
//   seconds of a step  = most over dp of compute of the slowest stage + idle time + communication
//   balance            = mean / most of compute over ranks of dp
//   bubble             = idle share of a stage. Of a tree whose trunk takes a forwards and c backwards, with waves of
//                        f + b: (pp - 1) (a + c), for the first stage has to end its forward before the next begins it,
//                        and the last one its backward; of m waves without a trunk (pp - 1) (f + b), one forward and
//                        one backward in turn (1F1B).
#pragma once

#include <span>
#include <string>
#include <vector>

#include "espalier/plan/communication.h"
#include "espalier/plan/planner.h"

namespace espalier {

struct LayoutProblem {
  std::span<const Rollout> rollouts;
  const std::vector<PrefixTree>& trees;
  const ModelShape& shape;
  PlanOptions options;  // memory_budget: of one rank; must_fit is not read
  const MachineProfile& profile;
  Choice<Sharding> shard = Sharding::none;
};

// The ranks of one stage of one place on the axis of dp.
struct RankCost {
  std::int64_t dp = 0, pp = 0;
  std::int64_t trees = 0, rows = 0;
  PlanCost cost;  // seconds: compute alone
  PlannedTraffic traffic;
};

struct LayoutPlan {
  Degrees degrees;
  Choice<Sharding> shard = Sharding::none;
  std::vector<RankCost> ranks;      // by dp, then pp
  std::int64_t parameters = 0;      // of the rank with most
  std::int64_t trunk_forwards = 0;  // of prompts, in the whole world; those of a tree that is cut count in every part
  PhasePeaks bytes;                 // of the rank with most, phase by phase
  double seconds = 0, compute_seconds = 0, communication_seconds = 0;  // the last two of the slowest rank
  double balance = 1, bubble = 0;
  std::int64_t missing_bytes = 0;  // beyond the budget of one rank; 0: it fits
  bool fits() const { return missing_bytes == 0; }
};

enum class WhichRanks { all, busiest };  // of dp; the latter with a balance of 1 unknown

// Errors: OptionError for degrees that do not divide the model; UnsupportedError for --shard full.
LayoutPlan plan_layout(const LayoutProblem& problem, const Degrees& degrees, WhichRanks which = WhichRanks::all);

Json to_json(const LayoutPlan& layout);
std::string explain(const LayoutPlan& layout);

}  // namespace espalier
