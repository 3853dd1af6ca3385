// Prefix trees: tokens common to several rollouts occur once. Built from token identity alone (token_identity.h).
//
// A node is a run of consecutive tokens, depth range [begin, end) of every rollout below it; a root-to-node path is a
// rollout's prompt + response. Several rollouts may end at one node (equal rollouts, or one a prefix of another), and a
// rollout may end at a node that has children.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "espalier/options/choices.h"
#include "espalier/rollout/rollout.h"

namespace espalier {

struct PrefixNode {
  std::int32_t parent = -1;                   // -1: a root
  std::int32_t begin = 0, end = 0;            // depths of its tokens
  std::int32_t rollout = 0;                   // one rollout below; its tokens [begin, end) are the node's
  std::int32_t leaf_begin = 0, leaf_end = 0;  // rollouts below: leaf_order[leaf_begin, leaf_end)
  std::vector<std::int32_t> children;         // node indices, depth-first order
  std::vector<std::int32_t> ends_here;        // rollouts whose last token is the node's last

  std::int32_t length() const { return end - begin; }
  std::int32_t multiplicity() const { return leaf_end - leaf_begin; }
};

struct PrefixTree {
  std::vector<PrefixNode> nodes;         // parents before children, depth-first; nodes[0] is the root
  std::vector<std::int32_t> leaf_order;  // rollouts by index, depth-first

  std::int64_t physical_tokens() const;  // sum of node lengths
  std::int64_t logical_tokens() const;   // sum of node length x multiplicity
};

// The tree of some rollouts of another tree, given by places in its leaf_order, ascending. Shared tokens occur
// once.
PrefixTree part_of(const PrefixTree& tree, std::span<const std::int32_t> leaves);

// The forest of some rollouts; trees in order of their first rollout, children in order of their first rollout.
// O(tokens) time. Equal tokens are always shared under `whole_trees`; whether sharing pays is the
// planner's question.
std::vector<PrefixTree> build_prefix_trees(std::span<const Rollout> rollouts, ShareMode mode);

}  // namespace espalier
