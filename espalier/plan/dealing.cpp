#include "espalier/plan/dealing.h"

#include <algorithm>
#include <functional>
#include <limits>
#include <numeric>

#include "espalier/plan/tree_index.h"

namespace espalier {

std::vector<double> seconds_of_trees(std::span<const Rollout> rollouts, const std::vector<PrefixTree>& trees,
                                     const LocalShape& shape, const PlanOptions& options,
                                     const MachineProfile& profile) {
  const EdgeIndex edges(rollouts, options.all_logprobs, !shape.whole().value_head, shape.whole().window);
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

namespace {

// Where the rows before and behind are most even.
std::int32_t middle_leaf(const TreeIndex& index) {
  std::int32_t best = 1;
  std::int64_t least = std::numeric_limits<std::int64_t>::max();
  for (std::int32_t leaf = 1; leaf < index.leaves(); ++leaf) {
    const std::int64_t rows = std::max(index.rows_of_leaves(0, leaf), index.rows_of_leaves(leaf, index.leaves()));
    if (rows < least) least = rows, best = leaf;
  }
  return best;
}

double longest_rank(std::span<const double> seconds, std::int64_t ranks) {
  std::vector<double> load(static_cast<std::size_t>(ranks));
  const std::vector<std::int64_t> rank_of = deal_by_weight(seconds, ranks);
  for (std::size_t tree = 0; tree < seconds.size(); ++tree)
    load[static_cast<std::size_t>(rank_of[tree])] += seconds[tree];
  return *std::ranges::max_element(load);
}

struct Weighed {
  std::vector<PrefixTree> trees;
  std::vector<double> seconds;
};

// The heaviest tree in two, again and again, until none is heavier than a fair share of the seconds, which grow by the
// prompt with every cut, or a part of the heaviest costs about as much as the whole: that rank would stay the longest.
Weighed cut_heavy(Weighed weighed, std::int64_t ranks, const std::function<double(const PrefixTree&)>& seconds_of,
                  const std::function<std::int32_t(const PrefixTree&)>& middle_of) {
  constexpr double kWorthCutting = 0.9;  // of the whole, the heavier part
  constexpr double kFair = 1.05;         // shares of parts that differ by a few rows
  double sum = std::accumulate(weighed.seconds.begin(), weighed.seconds.end(), 0.0);
  while (!weighed.trees.empty()) {
    const auto tree = std::ranges::max_element(weighed.seconds) - weighed.seconds.begin();
    const double seconds = weighed.seconds[static_cast<std::size_t>(tree)];
    const PrefixTree whole = weighed.trees[static_cast<std::size_t>(tree)];
    const auto leaves = static_cast<std::int32_t>(whole.leaf_order.size());
    if (leaves == 1 || seconds <= kFair * sum / static_cast<double>(ranks)) break;
    const std::int32_t middle = middle_of(whole);
    PrefixTree first = part_of(whole, 0, middle), second = part_of(whole, middle, leaves);
    const double a = seconds_of(first), b = seconds_of(second);
    if (std::max(a, b) > kWorthCutting * seconds) break;
    sum += a + b - seconds;
    weighed.trees[static_cast<std::size_t>(tree)] = std::move(first);
    weighed.seconds[static_cast<std::size_t>(tree)] = a;
    weighed.trees.insert(weighed.trees.begin() + tree + 1, std::move(second));
    weighed.seconds.insert(weighed.seconds.begin() + tree + 1, b);
  }
  return weighed;
}

}  // namespace

std::vector<std::vector<PrefixTree>> deal_trees(std::vector<PrefixTree> trees, std::int64_t ranks,
                                                std::span<const Rollout> rollouts, const LocalShape& shape,
                                                const PlanOptions& options, const MachineProfile& profile) {
  constexpr double kWorthHaving = 0.9;  // of the longest rank's seconds before
  std::vector<std::vector<PrefixTree>> dealt(static_cast<std::size_t>(ranks));
  if (ranks == 1) {
    dealt.front() = std::move(trees);
    return dealt;
  }
  Weighed weighed;
  weighed.seconds = seconds_of_trees(rollouts, trees, shape, options, profile);
  weighed.trees = std::move(trees);
  const EdgeIndex edges(rollouts, options.all_logprobs, !shape.whole().value_head, shape.whole().window);
  std::vector<std::int32_t> place(rollouts.size());
  const auto seconds_of = [&](const PrefixTree& tree) {
    return seconds_of_trees(rollouts, {tree}, shape, options, profile).front();
  };
  Weighed cut = cut_heavy(weighed, ranks, seconds_of,
                          [&](const PrefixTree& tree) { return middle_leaf(TreeIndex(tree, edges, place)); });
  if (longest_rank(cut.seconds, ranks) <= kWorthHaving * longest_rank(weighed.seconds, ranks)) weighed = std::move(cut);
  const std::vector<std::int64_t> rank_of = deal_by_weight(weighed.seconds, ranks);
  for (std::size_t tree = 0; tree < rank_of.size(); ++tree)
    dealt[static_cast<std::size_t>(rank_of[tree])].push_back(std::move(weighed.trees[tree]));
  return dealt;
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
