#include "espalier/plan/dealing.h"

#include <algorithm>
#include <functional>
#include <limits>
#include <numeric>
#include <queue>
#include <set>
#include <utility>

#include "espalier/plan/tree_cut.h"

namespace espalier {
namespace {

double seconds_of(const TreeIndex& index, const CostModel& model, Schedule schedule) {
  if (schedule != Schedule::dense) return model.seconds(index.subtree(0), SavedState::keep);
  Work work;
  for (std::int32_t leaf = 0; leaf < index.leaves(); ++leaf)
    work += index.work_of_leaf(leaf, 0, index.leaf_length(leaf));
  return model.seconds(work, SavedState::keep);
}

}  // namespace

std::vector<double> seconds_of_trees(std::span<const Rollout> rollouts, const std::vector<PrefixTree>& trees,
                                     const LocalShape& shape, const PlanOptions& options,
                                     const MachineProfile& profile) {
  const EdgeIndex edges(rollouts, options.all_logprobs, !shape.whole().value_head, shape.whole().window());
  const CostModel model(shape, profile, options.dtype, options.kind, options.setting);
  std::vector<std::int32_t> place(rollouts.size());
  std::vector<double> seconds;
  for (const PrefixTree& tree : trees) seconds.push_back(seconds_of({tree, edges, place}, model, options.schedule));
  return seconds;
}

namespace {

// A part of a tree; which of them.
struct Piece {
  std::size_t tree;
  TreeCut::Part part;
};

struct Dealt {
  std::vector<std::vector<Piece>> pieces;  // by rank, each rank's in the order of the trees and of their leaves
  double longest = 0;                      // seconds of the slowest rank
  std::int64_t rows = 0;                   // that all ranks run
};

// The trees of `is_cut` are cut into parts of at most `limit` seconds. Parts on one rank share what they have in
// common.
Dealt deal_pieces(const std::vector<TreeCut>& trees, const std::vector<bool>& is_cut, double limit,
                  std::int64_t ranks) {
  std::vector<Piece> pieces;
  std::vector<double> seconds;
  for (std::size_t tree = 0; tree < trees.size(); ++tree) {
    const TreeCut::Part whole = {0, trees[tree].leaves()};
    for (const TreeCut::Part part : is_cut[tree] ? trees[tree].parts(limit) : std::vector<TreeCut::Part>{whole})
      pieces.push_back({tree, part}), seconds.push_back(trees[tree].seconds(part));
  }
  Dealt dealt;
  dealt.pieces.resize(static_cast<std::size_t>(ranks));
  const std::vector<std::int64_t> rank_of = deal_by_weight(seconds, ranks);
  for (std::size_t i = 0; i < pieces.size(); ++i)
    dealt.pieces[static_cast<std::size_t>(rank_of[i])].push_back(pieces[i]);
  std::vector<TreeCut::Part> parts;
  for (const std::vector<Piece>& of_rank : dealt.pieces) {
    double load = 0;
    for (std::size_t i = 0; i < of_rank.size(); ++i) {
      parts.push_back(of_rank[i].part);
      if (i + 1 < of_rank.size() && of_rank[i + 1].tree == of_rank[i].tree) continue;
      const TreeCut& tree = trees[of_rank[i].tree];
      load += tree.seconds(parts), dealt.rows += tree.rows(parts);
      parts.clear();
    }
    dealt.longest = std::max(dealt.longest, load);
  }
  return dealt;
}

// Choices of trees to try cutting: all of more than `heavy` seconds, and with them some of the lightest, whose cuts
// repeat least: as many as are left over where every rank has equally many, and several other numbers of them.
std::vector<std::vector<bool>> trees_to_cut(const std::vector<double>& seconds, double heavy, std::int64_t ranks) {
  std::vector<bool> cut(seconds.size());
  std::vector<std::size_t> light;
  for (std::size_t tree = 0; tree < seconds.size(); ++tree)
    if (seconds[tree] > heavy)
      cut[tree] = true;
    else
      light.push_back(tree);
  std::ranges::stable_sort(light, {}, [&](std::size_t tree) { return seconds[tree]; });
  const auto most = std::min(light.size(), static_cast<std::size_t>(2 * ranks));
  std::set<std::size_t> numbers = {0, seconds.size() % static_cast<std::size_t>(ranks)};
  for (std::size_t number = 1; number <= most; number *= 2) numbers.insert(number);
  std::vector<std::vector<bool>> out;
  std::size_t done = 0;
  for (const std::size_t number : numbers) {
    if (number > most) break;
    while (done < number) cut[light[done++]] = true;
    out.push_back(cut);
  }
  return out;
}

// The limit of a part's seconds decides how trees are cut. Many are tried: below a fair share, whose small parts even
// ranks out and join again where they meet, and above it; of those that make the slowest rank about as fast as any
// does, the one that repeats least.
Dealt deal_cut(const std::vector<TreeCut>& trees, std::int64_t ranks) {
  constexpr double kWorthCutting = 0.9;          // of the slowest rank's seconds with whole trees
  constexpr double kFirst = 0.25, kStep = 1.03;  // limits: of a fair share; from one to the next
  constexpr double kAsGood = 1.02;               // above the least seconds
  constexpr double kHeavy = 1.05;                // of a fair share
  constexpr double kInfinity = std::numeric_limits<double>::infinity();
  Dealt whole = deal_pieces(trees, std::vector<bool>(trees.size()), kInfinity, ranks);
  std::vector<double> seconds;
  double longest_leaf = 0;
  for (const TreeCut& tree : trees) {
    seconds.push_back(tree.seconds(TreeCut::Part{0, tree.leaves()}));
    longest_leaf = std::max(longest_leaf, tree.longest_leaf());
  }
  const double share = std::accumulate(seconds.begin(), seconds.end(), 0.0) / static_cast<double>(ranks);
  const double fair = std::max(share, longest_leaf);  // no dealing is faster
  if (fair > kWorthCutting * whole.longest) return whole;
  std::vector<Dealt> tried;
  double least = kWorthCutting * whole.longest;
  for (const std::vector<bool>& is_cut : trees_to_cut(seconds, kHeavy * share, ranks))
    for (double limit = kFirst * fair; limit <= kAsGood * least; limit *= kStep) {
      tried.push_back(deal_pieces(trees, is_cut, limit, ranks));
      least = std::min(least, tried.back().longest);
    }
  std::erase_if(tried, [&](const Dealt& dealt) { return dealt.longest > kAsGood * least; });
  if (tried.empty()) return whole;
  return *std::ranges::min_element(tried, {}, [](const Dealt& dealt) { return std::pair(dealt.rows, dealt.longest); });
}

PrefixTree tree_of_parts(const PrefixTree& tree, std::span<const TreeCut::Part> parts) {
  std::vector<std::int32_t> leaves;
  for (const TreeCut::Part part : parts)
    for (std::int32_t leaf = part.begin; leaf < part.end; ++leaf) leaves.push_back(leaf);
  return part_of(tree, leaves);
}

// A divided wave's keys and values travel in every layer, which its predicted seconds leave out: it must save a tenth.
constexpr double kShardedCost = 1.1;

// Divides the first waves of `order` and deals the others; returns the seconds of the slowest rank.
double deal(std::vector<PlanItem>& items, const std::vector<std::size_t>& order, std::size_t sharded,
            std::int64_t ranks) {
  std::vector<double> load(static_cast<std::size_t>(ranks));
  double together = 0;
  for (std::size_t i = 0; i < order.size(); ++i) {
    PlanItem& item = items[order[i]];
    if (i < sharded) {
      item.cp_rank = PlanItem::kEveryRank;
      together += item.seconds;
      continue;
    }
    const auto least = std::ranges::min_element(load);
    item.cp_rank = static_cast<std::int32_t>(least - load.begin());
    *least += item.seconds;
  }
  return kShardedCost * together / static_cast<double>(ranks) + *std::ranges::max_element(load);
}

}  // namespace

DealtTrees deal_trees(std::vector<PrefixTree> trees, std::int64_t ranks, std::span<const Rollout> rollouts,
                      const LocalShape& shape, const PlanOptions& options, const MachineProfile& profile) {
  DealtTrees dealt;
  dealt.by_rank.resize(static_cast<std::size_t>(ranks));
  if (ranks == 1 || trees.empty()) {
    dealt.by_rank.front() = std::move(trees);
    return dealt;
  }
  const bool shared = options.schedule != Schedule::dense;
  const EdgeIndex edges(rollouts, options.all_logprobs, !shape.whole().value_head, shape.whole().window());
  const CostModel model(shape, profile, options.dtype, options.kind, options.setting);
  std::vector<std::int32_t> place(rollouts.size());
  std::vector<TreeCut> cuts;
  for (const PrefixTree& tree : trees) {
    const TreeIndex index(tree, edges, place);
    cuts.emplace_back(index, model, profile.large_rows(), seconds_of(index, model, options.schedule), shared);
    dealt.repeated_rows -= cuts.back().rows(TreeCut::Part{0, cuts.back().leaves()});
  }
  const Dealt best = deal_cut(cuts, ranks);
  dealt.repeated_rows += best.rows;
  std::vector<TreeCut::Part> parts;
  for (std::size_t rank = 0; rank < best.pieces.size(); ++rank) {
    const std::vector<Piece>& pieces = best.pieces[rank];
    for (std::size_t i = 0; i < pieces.size(); ++i) {
      parts.push_back(pieces[i].part);
      if (i + 1 < pieces.size() && pieces[i + 1].tree == pieces[i].tree) continue;
      PrefixTree& tree = trees[pieces[i].tree];
      const bool whole = parts.size() == 1 && parts.front() == TreeCut::Part{0, cuts[pieces[i].tree].leaves()};
      dealt.by_rank[rank].push_back(whole ? std::move(tree) : tree_of_parts(tree, parts));
      parts.clear();
    }
  }
  return dealt;
}

std::vector<std::int64_t> deal_by_weight(std::span<const double> weights, std::int64_t ranks) {
  std::vector<std::size_t> order(weights.size());
  std::iota(order.begin(), order.end(), std::size_t{0});
  std::ranges::stable_sort(order, [&](std::size_t a, std::size_t b) { return weights[a] > weights[b]; });
  using Load = std::pair<double, std::int64_t>;  // and its rank
  std::priority_queue<Load, std::vector<Load>, std::greater<>> loads;
  for (std::int64_t rank = 0; rank < ranks; ++rank) loads.emplace(0, rank);
  std::vector<std::int64_t> rank_of(weights.size());
  for (const std::size_t tree : order) {
    const auto [load, rank] = loads.top();
    loads.pop();
    rank_of[tree] = rank;
    loads.emplace(load + weights[tree], rank);
  }
  return rank_of;
}

void deal_waves(std::vector<PlanItem>& items, std::int64_t ranks) {
  if (ranks == 1) return;
  std::vector<std::size_t> order;
  for (std::size_t i = 0; i < items.size(); ++i) {
    if (items[i].kind == ItemKind::wave) order.push_back(i);
    deal_waves(items[i].below, ranks);
  }
  if (order.empty()) return;
  std::ranges::stable_sort(order, [&](std::size_t a, std::size_t b) { return items[a].seconds > items[b].seconds; });
  // Where there are more than a few waves for each rank, the lightest even out what the heaviest leave.
  const std::size_t most = std::min(order.size(), static_cast<std::size_t>(2 * ranks));
  std::size_t best = 0;
  double least = std::numeric_limits<double>::infinity();
  for (std::size_t sharded = 0; sharded <= most; ++sharded)
    if (const double seconds = deal(items, order, sharded, ranks); seconds < least) best = sharded, least = seconds;
  deal(items, order, best, ranks);
  // Stages of pp have several waves in flight: of those that ranks run together, the same ones on each.
  for (auto begin = items.begin(); begin != items.end();) {
    const auto is_trunk = [](const PlanItem& item) { return item.kind == ItemKind::trunk; };
    const auto end = std::find_if(begin, items.end(), is_trunk);
    std::stable_partition(begin, end, [](const PlanItem& item) { return item.cp_rank == PlanItem::kEveryRank; });
    begin = end == items.end() ? end : end + 1;
  }
}

}  // namespace espalier
