// Trees dealt to data-parallel ranks, whole but for heavy ones, so that no prompt is computed on two of them.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "espalier/grouping/prefix_tree.h"
#include "espalier/plan/cost_model.h"
#include "espalier/plan/planner.h"

namespace espalier {

// Predicted seconds of each tree by itself, with everything shared charged once (--schedule dense: once a rollout).
std::vector<double> seconds_of_trees(std::span<const Rollout> rollouts, const std::vector<PrefixTree>& trees,
                                     const LocalShape& shape, const PlanOptions& options,
                                     const MachineProfile& profile);

// The rank of each tree: the heaviest first, each to the rank that has least so far, the lowest among equals. With
// fewer trees than ranks some ranks have none.
std::vector<std::int64_t> deal_by_weight(std::span<const double> weights, std::int64_t ranks);

// The trees of every rank, each rank's in the order of `trees`. A tree that takes longer than a fair share of all of
// them, 1 / ranks, is cut between its rollouts, as long as that shortens the longest rank by a tenth or more: each part
// runs the prompt again, which costs less than waiting.
std::vector<std::vector<PrefixTree>> deal_trees(std::vector<PrefixTree> trees, std::int64_t ranks,
                                                std::span<const Rollout> rollouts, const LocalShape& shape,
                                                const PlanOptions& options, const MachineProfile& profile);

}  // namespace espalier
