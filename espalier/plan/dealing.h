// Trees dealt to the ranks of dp, whole but for heavy ones, so that no prompt is computed on two of them; waves dealt
// to the ranks of cp.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "espalier/forecast/cost_model.h"
#include "espalier/grouping/prefix_tree.h"
#include "espalier/plan/planner.h"
#include "espalier/program/step_plan.h"

namespace espalier {

// Predicted seconds of each tree by itself, with everything shared charged once (--schedule dense: once a rollout).
std::vector<double> seconds_of_trees(std::span<const Rollout> rollouts, const std::vector<PrefixTree>& trees,
                                     const LocalShape& shape, const PlanOptions& options,
                                     const MachineProfile& profile);

// The rank of each tree: the heaviest first, each to the rank that has least so far, the lowest among equals. With
// fewer trees than ranks some ranks have none.
std::vector<std::int64_t> deal_by_weight(std::span<const double> weights, std::int64_t ranks);

struct DealtTrees {
  std::vector<std::vector<PrefixTree>> by_rank;  // each rank's in the order of the trees
  std::int64_t repeated_rows = 0;                // that all ranks run together beyond those of the whole trees
};

// A tree that takes longer than a fair share of all of them, 1 / ranks, is cut between its rollouts where that shortens
// the longest rank by a tenth or more; parts of it on one rank are one tree again. Each rank runs what is above its
// part, so it is cut where that is least (plan/tree_cut.h): of the cuts tried whose longest rank is within 2 % of the
// best, the one with the fewest rows.
DealtTrees deal_trees(std::vector<PrefixTree> trees, std::int64_t ranks, std::span<const Rollout> rollouts,
                      const LocalShape& shape, const PlanOptions& options, const MachineProfile& profile);

// Sets PlanItem::cp_rank of all waves. Trunks are divided row by row (program/row_shares.h). Waves are dealt whole
// where that balances: given the path they do not depend on each other, so none of their keys and values travel. Those
// of one trunk are dealt by predicted seconds, the heaviest first, each to the rank that has least; as many of the
// heaviest are divided as make the slowest rank fastest, and these come first.
void deal_waves(std::vector<PlanItem>& items, std::int64_t ranks);

}  // namespace espalier
