// Counts of rollouts and prefix trees that the planner uses repeatedly, computed once.
//
// A leaf is a place in PrefixTree::leaf_order; a node's leaves are a contiguous range of them. Work of a node or a
// subtree is exact: rows with edges are counted once for each temperature, however many rollouts own the edge.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "espalier/grouping/prefix_tree.h"
#include "espalier/program/draft_item.h"
#include "espalier/rollout/rollout.h"

namespace espalier {

// The rows of a rollout with a loss edge: those that predict a target with loss, or all that predict.
class EdgeIndex {
 public:
  // `by_temperature`: a row is one output for each temperature of its edges. `window`: the model's, 0 without one.
  // The rollouts must outlive the object. Errors: InternalError if a loss mask does not have one entry per target.
  EdgeIndex(std::span<const Rollout> rollouts, bool all_logprobs, bool by_temperature, std::int64_t window);

  std::int64_t window() const { return window_; }

  // Depth of the row of the rollout's last edge; -1: it has none.
  std::int32_t last_row(std::int32_t rollout) const { return last_row_[rollout]; }
  std::int32_t length(std::int32_t rollout) const { return rollouts_[rollout].length(); }

  // Adds the rows at depths [begin, end), shared by all of `rollouts` that reach them, to work.outputs and their
  // pairs.
  void add_outputs(std::span<const std::int32_t> rollouts, std::int32_t begin, std::int32_t end, Work& work) const;

 private:
  bool has_edge(std::int32_t rollout, std::int32_t predicting) const;
  void add_outputs_of_one(std::int32_t rollout, std::int32_t begin, std::int32_t end, Work& work) const;
  void add_outputs_of_one_temperature(std::span<const std::int32_t> rollouts, std::int32_t begin, std::int32_t end,
                                      Work& work) const;

  std::span<const Rollout> rollouts_;
  std::vector<std::uint8_t> whole_;  // every target has an edge
  std::vector<std::int32_t> last_row_;
  bool temperatures_differ_ = false;
  std::int64_t window_;
};

class TreeIndex {
 public:
  // `place`: one entry for each rollout, overwritten for the rollouts of this tree. The tree and the edges must
  // outlive the object.
  TreeIndex(const PrefixTree& tree, const EdgeIndex& edges, std::span<std::int32_t> place);

  const PrefixTree& tree() const { return *tree_; }
  const PrefixNode& node(std::int32_t node) const { return tree_->nodes[node]; }
  std::int32_t leaves() const { return static_cast<std::int32_t>(tree_->leaf_order.size()); }
  std::int32_t leaf_length(std::int32_t leaf) const { return node(end_node_[leaf]).end; }
  std::span<const std::int32_t> rollouts(std::int32_t leaf_begin, std::int32_t leaf_end) const {
    return {tree_->leaf_order.data() + leaf_begin, static_cast<std::size_t>(leaf_end - leaf_begin)};
  }

  // Rows of the union of the paths of leaves [leaf_begin, leaf_end), from depth 0.
  std::int64_t rows_of_leaves(std::int32_t leaf_begin, std::int32_t leaf_end) const {
    return leaf_length(leaf_begin) + new_rows_[leaf_end] - new_rows_[leaf_begin + 1];
  }
  const Work& subtree(std::int32_t node) const { return subtree_[node]; }
  const Work& own(std::int32_t node) const { return node_[node]; }  // of the node's own rows
  std::int32_t end_node(std::int32_t leaf) const { return end_node_[leaf]; }

  // Work of the rows at depths [begin, end) of one leaf's path.
  Work work_of_leaf(std::int32_t leaf, std::int32_t begin, std::int32_t end) const;
  // Work of the rows of leaves [leaf_begin, leaf_end) at depths [begin, end). If `end` is not the end of all paths, the
  // paths coincide down to it.
  Work work_of_leaves(std::int32_t leaf_begin, std::int32_t leaf_end, std::int32_t begin, std::int32_t end) const;

  // Calls visit(node, leaf_begin, leaf_end, begin, end) in depth-first order for every node that leaves
  // [leaf_begin, leaf_end) pass, clipped to them and to depths [begin, end) as above.
  template <class Visit>
  void for_each_node(std::int32_t leaf_begin, std::int32_t leaf_end, std::int32_t begin, std::int32_t end,
                     Visit visit) const;

 private:
  Work work_of_node(std::int32_t node, std::int32_t leaf_begin, std::int32_t leaf_end, std::int32_t begin,
                    std::int32_t end) const;
  std::int32_t first_node_from(std::int32_t leaf) const;  // first node whose leaves begin at `leaf` or later

  const PrefixTree* tree_;
  const EdgeIndex* edges_;
  std::vector<std::int32_t> end_node_;  // by leaf
  std::vector<std::int64_t> new_rows_;  // prefix sums over leaves of the rows not shared with the previous leaf
  std::int64_t forks_of_leaves(std::int32_t leaf_begin, std::int32_t leaf_end, std::int32_t begin) const;

  std::vector<Work> node_, subtree_;  // all leaves below
  std::vector<Work> leaf_;            // whole rollouts
};

template <class Visit>
void TreeIndex::for_each_node(std::int32_t leaf_begin, std::int32_t leaf_end, std::int32_t begin, std::int32_t end,
                              Visit visit) const {
  const auto call = [&](std::int32_t index) {
    const PrefixNode& at = node(index);
    const std::int32_t low = at.begin > begin ? at.begin : begin, high = at.end < end ? at.end : end;
    if (low >= high) return;
    visit(index, at.leaf_begin > leaf_begin ? at.leaf_begin : leaf_begin,
          at.leaf_end < leaf_end ? at.leaf_end : leaf_end, low, high);
  };
  // Nodes above the range: found on the way up from the first leaf. A clipped path has no others.
  const bool path = end != kToTheEnd;
  std::vector<std::int32_t> above;
  for (std::int32_t at = end_node_[leaf_begin]; at >= 0 && node(at).end > begin; at = node(at).parent)
    if (path || node(at).leaf_begin < leaf_begin) above.push_back(at);
  for (auto at = above.rbegin(); at != above.rend(); ++at) call(*at);
  if (path) return;
  const std::int32_t last = first_node_from(leaf_end);
  for (std::int32_t index = first_node_from(leaf_begin); index < last; ++index) call(index);
}

}  // namespace espalier
