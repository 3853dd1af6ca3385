// Deals trees to the ranks of dp, and waves to the ranks of cp. Only heavy trees are cut, so almost every prompt is
// computed on one rank.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "espalier/forecast/cost_model.h"
#include "espalier/grouping/prefix_tree.h"
#include "espalier/plan/planner.h"
#include "espalier/program/step_plan.h"

namespace espalier {

// Predicted seconds of each tree alone. Shared rows count once (--schedule dense: once for each rollout).
std::vector<double> seconds_of_trees(std::span<const Rollout> rollouts, const std::vector<PrefixTree>& trees,
                                     const LocalShape& shape, const PlanOptions& options,
                                     const MachineProfile& profile);

// The rank of each tree: heaviest tree first, each to the least loaded rank, the lowest among equals. With fewer trees
// than ranks some ranks have none.
std::vector<std::int64_t> deal_by_weight(std::span<const double> weights, std::int64_t ranks);

struct DealtTrees {
  std::vector<std::vector<PrefixTree>> by_rank;  // each rank's in the order of the trees
  std::int64_t repeated_rows = 0;                // summed over ranks, beyond the rows of the whole trees
};

// A tree that takes more than 1 / ranks of the total time is cut between its rollouts if that shortens the slowest rank
// by a tenth or more. So are some of the lightest trees if whole ones leave ranks uneven (three equal trees on two).
// Parts on one rank become one tree again. Every rank runs the rows above its part, so the cut is chosen to repeat few
// rows (plan/tree_cut.h): among the tried cuts whose slowest rank is within 2 % of the best, the one with the fewest
// rows.
DealtTrees deal_trees(std::vector<PrefixTree> trees, std::int64_t ranks, std::span<const Rollout> rollouts,
                      const LocalShape& shape, const PlanOptions& options, const MachineProfile& profile);

// Sets PlanItem::cp_rank of all waves. Trunks are sharded over cp by rows (program/row_shares.h). Waves are dealt whole
// if that balances: given the path, waves are independent, so their keys and values need not be sent. Waves of one
// trunk are dealt by predicted seconds, heaviest first, each to the least loaded rank. Some of the heaviest waves are
// sharded instead, as many as make the slowest rank fastest; these run first.
void deal_waves(std::vector<PlanItem>& items, std::int64_t ranks);

}  // namespace espalier
