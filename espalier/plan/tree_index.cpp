// Counts over rollouts and nodes.
#include "espalier/plan/tree_index.h"

#include <algorithm>
#include <cstring>

#include "espalier/base/error.h"

namespace espalier {

EdgeIndex::EdgeIndex(std::span<const Rollout> rollouts, bool all_logprobs, bool by_temperature, std::int64_t window)
    : rollouts_(rollouts), whole_(rollouts.size()), last_row_(rollouts.size(), -1), window_(window) {
  for (std::size_t i = 0; i < rollouts.size(); ++i) {
    const Rollout& rollout = rollouts[i];
    const auto size = static_cast<std::size_t>(rollout.targets());
    ESPALIER_INTERNAL_EQ(rollout.loss_mask.size(), size, "loss mask of rollout ", i);
    whole_[i] = all_logprobs || size == 0 || std::memchr(rollout.loss_mask.data(), 0, size) == nullptr;
    std::int32_t last = rollout.predicting() - 1;
    while (last >= 0 && !has_edge(static_cast<std::int32_t>(i), last)) --last;
    if (last >= 0) last_row_[i] = rollout.first_predicting() + last;
    temperatures_differ_ |= by_temperature && rollout.temperature != rollouts[0].temperature;
  }
}

// True if the rollout's row `predicting`, counted from its first that predicts, has an edge.
bool EdgeIndex::has_edge(std::int32_t index, std::int32_t predicting) const {
  if (whole_[index]) return true;
  const Rollout& rollout = rollouts_[index];
  const auto columns = static_cast<std::size_t>(rollout.columns());
  const std::uint8_t* const mask = rollout.loss_mask.data() + static_cast<std::size_t>(predicting) * columns;
  return std::any_of(mask, mask + columns, [](std::uint8_t one) { return one != 0; });
}

void EdgeIndex::add_outputs_of_one(std::int32_t index, std::int32_t begin, std::int32_t end, Work& work) const {
  const Rollout& rollout = rollouts_[index];
  const std::int32_t shift = rollout.first_predicting();
  const std::int32_t low = std::max(begin, shift), high = std::min(end, shift + rollout.predicting());
  if (low >= high) return;
  if (whole_[index]) {
    const Work range = work_of_depths(low, high, true, window_);
    work.outputs += range.outputs, work.output_pairs += range.output_pairs;
    work.window_output_pairs += range.window_output_pairs;
    return;
  }
  std::int64_t count = 0, pairs = 0, window_pairs = 0;
  for (std::int32_t depth = low; depth < high; ++depth) {
    const std::int64_t one = has_edge(index, depth - shift);
    count += one, pairs += one * (depth + 1), window_pairs += one * pairs_in_window(depth, window_);
  }
  work.outputs += count, work.output_pairs += pairs, work.window_output_pairs += window_pairs;
}

void EdgeIndex::add_outputs(std::span<const std::int32_t> rollouts, std::int32_t begin, std::int32_t end,
                            Work& work) const {
  if (!temperatures_differ_) return add_outputs_of_one_temperature(rollouts, begin, end, work);
  std::vector<std::int32_t> left(rollouts.begin(), rollouts.end());
  const auto temperature_of = [this](std::int32_t index) { return rollouts_[index].temperature; };
  std::ranges::stable_sort(left, {}, temperature_of);
  for (auto from = left.begin(); from != left.end();) {
    const auto to =
        std::find_if(from, left.end(), [&](std::int32_t i) { return temperature_of(i) != temperature_of(*from); });
    add_outputs_of_one_temperature({from, to}, begin, end, work);
    from = to;
  }
}

void EdgeIndex::add_outputs_of_one_temperature(std::span<const std::int32_t> rollouts, std::int32_t begin,
                                               std::int32_t end, Work& work) const {
  if (end <= begin) return;
  if (rollouts.size() == 1) return add_outputs_of_one(rollouts[0], begin, end, work);
  std::int32_t missing = -1;  // -1: no rollout has reached the range with its response yet
  std::vector<std::uint8_t> seen;
  for (std::int32_t index : rollouts) {
    const std::int32_t shift = rollouts_[index].first_predicting();
    const std::int32_t low = std::max(begin, shift), high = std::min(end, shift + rollouts_[index].predicting());
    if (low >= high) continue;
    if (missing < 0) seen.assign(end - begin, 0), missing = end - begin;
    for (std::int32_t depth = low; depth < high; ++depth) {
      if (seen[depth - begin] || !has_edge(index, depth - shift)) continue;
      seen[depth - begin] = 1, --missing;
      work.outputs += 1, work.output_pairs += depth + 1, work.window_output_pairs += pairs_in_window(depth, window_);
    }
    if (missing == 0) return;
  }
}

TreeIndex::TreeIndex(const PrefixTree& tree, const EdgeIndex& edges, std::span<std::int32_t> place)
    : tree_(&tree), edges_(&edges) {
  const std::int32_t count = static_cast<std::int32_t>(tree.nodes.size());
  for (std::int32_t leaf = 0; leaf < leaves(); ++leaf) place[tree.leaf_order[leaf]] = leaf;
  end_node_.assign(leaves(), -1);
  for (std::int32_t i = 0; i < count; ++i)
    for (std::int32_t rollout : tree.nodes[i].ends_here) end_node_[place[rollout]] = i;

  // Depth shared with the leaf before: the end of the parent of the topmost node that begins with the leaf; where no
  // node begins with it, the leaf ends on the way of the one before.
  std::vector<std::int32_t> common(leaves());
  for (std::int32_t leaf = 0; leaf < leaves(); ++leaf) {
    ESPALIER_INTERNAL(end_node_[leaf] >= 0, "rollout ", tree.leaf_order[leaf], " ends at no node of its tree");
    common[leaf] = leaf_length(leaf);
  }
  for (std::int32_t i = count - 1; i >= 0; --i) {  // backwards: the topmost is written last
    const PrefixNode& at = node(i);
    common[at.leaf_begin] = at.parent < 0 ? 0 : node(at.parent).end;
  }
  new_rows_.assign(leaves() + 1, 0);
  for (std::int32_t leaf = 0; leaf < leaves(); ++leaf)
    new_rows_[leaf + 1] = new_rows_[leaf] + leaf_length(leaf) - common[leaf];

  node_.resize(count);
  subtree_.resize(count);
  for (std::int32_t i = count - 1; i >= 0; --i) {
    const PrefixNode& at = node(i);
    node_[i] = work_of_depths(at.begin, at.end, false, edges.window());
    edges.add_outputs(rollouts(at.leaf_begin, at.leaf_end), at.begin, at.end, node_[i]);
    subtree_[i] += node_[i];
    subtree_[i].forks += at.children.size() > 1 ? 1 : 0;
    if (at.parent >= 0) subtree_[at.parent] += subtree_[i];
  }
  leaf_.resize(leaves());
  for (std::int32_t leaf = 0; leaf < leaves(); ++leaf) {
    const PrefixNode& at = node(end_node_[leaf]);
    const std::int32_t own = at.multiplicity() == 1 ? at.begin : at.end;  // from here on the node's count is the leaf's
    leaf_[leaf] = work_of_depths(0, at.end, false, edges.window());
    edges.add_outputs(rollouts(leaf, leaf + 1), 0, own, leaf_[leaf]);
    if (own == at.end) continue;
    const Work& last = node_[end_node_[leaf]];
    leaf_[leaf].outputs += last.outputs, leaf_[leaf].output_pairs += last.output_pairs;
    leaf_[leaf].window_output_pairs += last.window_output_pairs;
  }
}

std::int32_t TreeIndex::first_node_from(std::int32_t leaf) const {
  const auto& nodes = tree_->nodes;
  const auto found =
      std::partition_point(nodes.begin(), nodes.end(), [leaf](const PrefixNode& at) { return at.leaf_begin < leaf; });
  return static_cast<std::int32_t>(found - nodes.begin());
}

Work TreeIndex::work_of_node(std::int32_t index, std::int32_t leaf_begin, std::int32_t leaf_end, std::int32_t begin,
                             std::int32_t end) const {
  const PrefixNode& at = node(index);
  const bool whole = begin == at.begin && end == at.end && leaf_begin == at.leaf_begin && leaf_end == at.leaf_end;
  if (whole) return node_[index];
  Work work = work_of_depths(begin, end, false, edges_->window());
  if (node_[index].outputs > 0) edges_->add_outputs(rollouts(leaf_begin, leaf_end), begin, end, work);
  return work;
}

Work TreeIndex::work_of_leaf(std::int32_t leaf, std::int32_t begin, std::int32_t end) const {
  end = std::min(end, leaf_length(leaf));
  if (begin == 0 && end == leaf_length(leaf)) return leaf_[leaf];
  const PrefixNode& last = node(end_node_[leaf]);
  if (last.multiplicity() == 1 && begin == last.begin && end == last.end) return node_[end_node_[leaf]];
  Work work = work_of_depths(begin, end, false, edges_->window());
  edges_->add_outputs(rollouts(leaf, leaf + 1), begin, end, work);
  return work;
}

Work TreeIndex::work_of_leaves(std::int32_t leaf_begin, std::int32_t leaf_end, std::int32_t begin,
                               std::int32_t end) const {
  if (leaf_end - leaf_begin == 1) return work_of_leaf(leaf_begin, begin, end);
  if (end == kToTheEnd) {
    std::int32_t top = end_node_[leaf_begin];
    while (node(top).begin > begin) top = node(top).parent;
    if (node(top).leaf_begin == leaf_begin && node(top).leaf_end == leaf_end) {
      const auto difference = [](const Work& a, const Work& b) {
        return Work{a.rows - b.rows,
                    a.pairs - b.pairs,
                    a.outputs - b.outputs,
                    a.output_pairs - b.output_pairs,
                    a.window_pairs - b.window_pairs,
                    a.window_output_pairs - b.window_output_pairs,
                    a.forks - b.forks};
      };
      Work work = difference(subtree_[top], node_[top]);
      return work += work_of_node(top, leaf_begin, leaf_end, begin, node(top).end);
    }
  }
  Work work;
  for_each_node(leaf_begin, leaf_end, begin, end,
                [&](std::int32_t index, std::int32_t low, std::int32_t high, std::int32_t from, std::int32_t to) {
                  work += work_of_node(index, low, high, from, to);
                });
  if (end == kToTheEnd) work.forks = forks_of_leaves(leaf_begin, leaf_end, begin);
  return work;
}

// Nodes that several of the visited nodes follow; they come in depth-first order.
std::int64_t TreeIndex::forks_of_leaves(std::int32_t leaf_begin, std::int32_t leaf_end, std::int32_t begin) const {
  struct Open {
    std::int32_t node, children;
  };
  std::vector<Open> open;
  std::int64_t forks = 0;
  for_each_node(leaf_begin, leaf_end, begin, kToTheEnd,
                [&](std::int32_t index, std::int32_t, std::int32_t, std::int32_t, std::int32_t) {
                  while (!open.empty() && open.back().node != node(index).parent) open.pop_back();
                  if (!open.empty() && ++open.back().children == 2) ++forks;
                  open.push_back({index, 0});
                });
  return forks;
}

}  // namespace espalier
