#include "espalier/plan/dealing.h"

#include <algorithm>
#include <numeric>

#include "espalier/plan/tree_index.h"

namespace espalier {

std::vector<double> seconds_of_trees(std::span<const Rollout> rollouts, const std::vector<PrefixTree>& trees,
                                     const ModelShape& shape, const PlanOptions& options,
                                     const MachineProfile& profile) {
  const EdgeIndex edges(rollouts, options.all_logprobs);
  const CostModel model(shape, profile, options.dtype, options.kind);
  std::vector<std::int32_t> place(rollouts.size());
  std::vector<double> seconds;
  for (const PrefixTree& tree : trees) {
    const TreeIndex index(tree, edges, place);
    Work work;
    if (options.schedule == Schedule::dense)
      for (std::int32_t leaf = 0; leaf < index.leaves(); ++leaf)
        work += index.work_of_leaf(leaf, 0, index.leaf_length(leaf));
    else
      work = index.subtree(0);
    seconds.push_back(model.seconds(work, SavedState::keep));
  }
  return seconds;
}

std::vector<std::int64_t> deal_by_weight(std::span<const double> weights, std::int64_t ranks) {
  std::vector<std::size_t> order(weights.size());
  std::iota(order.begin(), order.end(), std::size_t{0});
  std::ranges::stable_sort(order, [&](std::size_t a, std::size_t b) { return weights[a] > weights[b]; });
  std::vector<double> load(static_cast<std::size_t>(ranks));
  std::vector<std::int64_t> rank_of(weights.size());
  for (const std::size_t tree : order) {
    const auto least = std::ranges::min_element(load);
    rank_of[tree] = least - load.begin();
    *least += weights[tree];
  }
  return rank_of;
}

}  // namespace espalier
