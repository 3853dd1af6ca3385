// A compressed trie, grown by one rollout after the other: walk down while tokens agree, split the node where they
// part.
//
// Every token of a rollout is compared once, with the rollout that first brought it in (which stays in the cache while
// its group is inserted), eight bytes at a time; a node's child is found by its first token in one hash table. So the
// time is that of reading the tokens once, and children stand in order of first appearance without a sort.
#include "espalier/grouping/prefix_tree.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <numeric>
#include <unordered_map>

#include "espalier/base/error.h"
#include "espalier/grouping/token_identity.h"
#include "espalier/rollout/token_hash.h"

namespace espalier {
namespace {

constexpr std::int32_t kNone = -1;

// The first index below n where a and b differ, n if none does.
std::int32_t first_difference(const std::int32_t* a, const std::int32_t* b, std::int32_t n) {
  std::int32_t at = 0;
  const auto words = [&](std::int32_t i) {
    std::uint64_t x, y;
    std::memcpy(&x, a + i, sizeof x);
    std::memcpy(&y, b + i, sizeof y);
    return x ^ y;
  };
  while (at + 8 <= n && (words(at) | words(at + 2) | words(at + 4) | words(at + 6)) == 0) at += 8;
  while (at < n && a[at] == b[at]) ++at;
  return at;
}

// (node, token) -> the child of the node that begins with the token. Open addressing; entries are never removed.
class ChildTable {
 public:
  explicit ChildTable(std::size_t most_entries)
      : slots_(std::bit_ceil(2 * most_entries + 2), Slot{kEmpty, kNone}), mask_(slots_.size() - 1) {}

  // The entry's value, kNone in a new entry. Valid until the next call.
  std::int32_t& child(std::int32_t node, std::int32_t token) {
    const std::uint64_t key =
        static_cast<std::uint64_t>(static_cast<std::uint32_t>(node + 1)) << 32 | static_cast<std::uint32_t>(token);
    std::size_t at = (key * 0x9e3779b97f4a7c15u) >> 20 & mask_;
    while (slots_[at].key != key && slots_[at].key != kEmpty) at = (at + 1) & mask_;
    slots_[at].key = key;
    return slots_[at].value;
  }

 private:
  static constexpr std::uint64_t kEmpty = ~std::uint64_t{0};
  struct Slot {
    std::uint64_t key;
    std::int32_t value;
  };
  std::vector<Slot> slots_;
  std::size_t mask_;
};

struct GrowingNode {
  PrefixNode node;
  std::int32_t place_in_parent = 0;
};

class Forest {
 public:
  explicit Forest(std::span<const Rollout> rollouts)
      : rollouts_(rollouts), tokens_(rollouts), table_(2 * rollouts.size()) {
    nodes_.reserve(2 * rollouts.size());  // each insertion adds a leaf, or splits a node, or both
  }

  void insert(std::int32_t index) {
    const std::int32_t length = rollouts_[static_cast<std::size_t>(index)].length();
    std::int32_t parent = kNone, depth = 0;
    while (true) {
      std::int32_t& child = table_.child(parent, tokens_.at(index, depth));
      if (child == kNone) {
        child = add_node(parent, depth, length, index);
        nodes_[at(child)].node.ends_here.push_back(index);
        return;
      }
      std::int32_t current = child;
      const std::int32_t end = nodes_[at(current)].node.end;
      const std::int32_t first_below = nodes_[at(current)].node.rollout;
      depth = agree_until(index, first_below, depth, std::min(end, length));
      if (depth < end) {
        child = split(current, depth);
        const std::int32_t upper = child;
        table_.child(upper, tokens_.at(first_below, depth)) = current;
        current = upper;
      }
      if (depth == length) {
        nodes_[at(current)].node.ends_here.push_back(index);
        return;
      }
      parent = current;
    }
  }

  std::vector<PrefixTree> trees() && {
    std::vector<PrefixTree> out;
    for (const std::int32_t root : roots_) out.push_back(flattened(root));
    return out;
  }

 private:
  // The first depth in [from, to) where rollouts a and b differ, `to` if none does. Both are at least `to` long.
  std::int32_t agree_until(std::int32_t a, std::int32_t b, std::int32_t from, std::int32_t to) const {
    while (from < to) {
      const auto x = tokens_.run_at(a, from), y = tokens_.run_at(b, from);
      const auto n = static_cast<std::int32_t>(
          std::min({x.size(), y.size(), static_cast<std::size_t>(to) - static_cast<std::size_t>(from)}));
      const std::int32_t equal = first_difference(x.data(), y.data(), n);
      from += equal;
      if (equal < n) break;
    }
    return from;
  }

  static std::size_t at(std::int32_t node) { return static_cast<std::size_t>(node); }
  std::vector<std::int32_t>& siblings_below(std::int32_t parent) {
    return parent == kNone ? roots_ : nodes_[at(parent)].node.children;
  }

  std::int32_t add_node(std::int32_t parent, std::int32_t begin, std::int32_t end, std::int32_t rollout) {
    const auto id = static_cast<std::int32_t>(nodes_.size());
    std::vector<std::int32_t>& siblings = siblings_below(parent);
    GrowingNode grown;
    grown.node.parent = parent;
    grown.node.begin = begin;
    grown.node.end = end;
    grown.node.rollout = rollout;
    grown.place_in_parent = static_cast<std::int32_t>(siblings.size());
    siblings.push_back(id);
    nodes_.push_back(std::move(grown));
    return id;
  }

  // Cuts the node at `depth`: the lower part keeps its number (and with it its children), the upper one takes its
  // place. The caller enters both in the table.
  std::int32_t split(std::int32_t lower, std::int32_t depth) {
    const auto upper = static_cast<std::int32_t>(nodes_.size());
    GrowingNode above;
    GrowingNode& below = nodes_[at(lower)];
    above.node.parent = below.node.parent;
    above.node.begin = below.node.begin;
    above.node.end = depth;
    above.node.rollout = below.node.rollout;
    above.node.children = {lower};
    above.place_in_parent = below.place_in_parent;
    siblings_below(below.node.parent)[static_cast<std::size_t>(below.place_in_parent)] = upper;
    below.node.parent = upper;
    below.node.begin = depth;
    below.place_in_parent = 0;
    nodes_.push_back(std::move(above));
    return upper;
  }

  PrefixTree flattened(std::int32_t root) {
    PrefixTree tree;
    struct Pending {
      std::int32_t grown, parent;
    };
    std::vector<Pending> stack = {{root, kNone}};
    while (!stack.empty()) {
      const Pending next = stack.back();
      stack.pop_back();
      const auto id = static_cast<std::int32_t>(tree.nodes.size());
      if (next.parent != kNone) tree.nodes[at(next.parent)].children.push_back(id);
      PrefixNode node = std::move(nodes_[at(next.grown)].node);
      for (auto child = node.children.rbegin(); child != node.children.rend(); ++child) stack.push_back({*child, id});
      node.children.clear();
      node.parent = next.parent;
      node.leaf_begin = static_cast<std::int32_t>(tree.leaf_order.size());
      tree.leaf_order.insert(tree.leaf_order.end(), node.ends_here.begin(), node.ends_here.end());
      node.leaf_end = static_cast<std::int32_t>(tree.leaf_order.size());
      tree.nodes.push_back(std::move(node));
    }
    for (auto node = tree.nodes.rbegin(); node != tree.nodes.rend(); ++node)
      if (!node->children.empty()) node->leaf_end = tree.nodes[at(node->children.back())].leaf_end;
    return tree;
  }

  std::span<const Rollout> rollouts_;
  TokenIdentity tokens_;
  ChildTable table_;
  std::vector<GrowingNode> nodes_;
  std::vector<std::int32_t> roots_;
};

PrefixTree single_node_tree(const Rollout& rollout, std::int32_t index) {
  PrefixTree tree;
  PrefixNode node;
  node.end = rollout.length();
  node.rollout = index;
  node.leaf_end = 1;
  node.ends_here = {index};
  tree.nodes.push_back(std::move(node));
  tree.leaf_order = {index};
  return tree;
}

// One prompt node, a child for each response that is not empty.
PrefixTree prompt_tree(std::span<const Rollout> rollouts, const std::vector<std::int32_t>& members) {
  const auto rollout_at = [&](std::int32_t index) -> const Rollout& {
    return rollouts[static_cast<std::size_t>(index)];
  };
  if (members.size() == 1) return single_node_tree(rollout_at(members[0]), members[0]);
  PrefixTree tree;
  tree.nodes.emplace_back();
  PrefixNode& root = tree.nodes[0];
  root.end = rollout_at(members[0]).prompt_length();
  root.rollout = members[0];
  root.leaf_end = static_cast<std::int32_t>(members.size());
  for (const std::int32_t index : members)
    if (rollout_at(index).response_ids.empty()) root.ends_here.push_back(index);
  tree.leaf_order = root.ends_here;
  for (const std::int32_t index : members) {
    if (rollout_at(index).response_ids.empty()) continue;
    PrefixNode leaf;
    leaf.parent = 0;
    leaf.begin = tree.nodes[0].end;
    leaf.end = rollout_at(index).length();
    leaf.rollout = index;
    leaf.leaf_begin = static_cast<std::int32_t>(tree.leaf_order.size());
    leaf.leaf_end = leaf.leaf_begin + 1;
    leaf.ends_here = {index};
    tree.leaf_order.push_back(index);
    tree.nodes[0].children.push_back(static_cast<std::int32_t>(tree.nodes.size()));
    tree.nodes.push_back(std::move(leaf));
  }
  return tree;
}

struct PromptHash {
  std::size_t operator()(const Rollout* rollout) const { return hash_of_tokens(rollout->prompt_ids); }
};
struct PromptEqual {
  bool operator()(const Rollout* a, const Rollout* b) const { return same_prompt(*a, *b); }
};

std::vector<PrefixTree> prompt_trees(std::span<const Rollout> rollouts) {
  std::unordered_map<const Rollout*, std::size_t, PromptHash, PromptEqual> tree_of;
  std::vector<std::vector<std::int32_t>> members;
  for (std::size_t i = 0; i < rollouts.size(); ++i) {
    const auto [entry, is_new] = tree_of.try_emplace(&rollouts[i], members.size());
    if (is_new) members.emplace_back();
    members[entry->second].push_back(static_cast<std::int32_t>(i));
  }
  std::vector<PrefixTree> trees;
  for (const std::vector<std::int32_t>& of_prompt : members) trees.push_back(prompt_tree(rollouts, of_prompt));
  return trees;
}

}  // namespace

std::int64_t PrefixTree::physical_tokens() const {
  return std::accumulate(nodes.begin(), nodes.end(), std::int64_t{0},
                         [](std::int64_t sum, const PrefixNode& node) { return sum + node.length(); });
}

std::int64_t PrefixTree::logical_tokens() const {
  return std::accumulate(nodes.begin(), nodes.end(), std::int64_t{0}, [](std::int64_t sum, const PrefixNode& node) {
    return sum + std::int64_t{node.length()} * node.multiplicity();
  });
}

PrefixTree part_of(const PrefixTree& tree, std::span<const std::int32_t> leaves) {
  PrefixTree part;
  for (const std::int32_t leaf : leaves) part.leaf_order.push_back(tree.leaf_order[static_cast<std::size_t>(leaf)]);
  std::vector<std::int32_t> sorted = part.leaf_order;
  std::ranges::sort(sorted);
  const auto before = [&](std::int32_t leaf) {
    return static_cast<std::int32_t>(std::ranges::lower_bound(leaves, leaf) - leaves.begin());
  };
  std::vector<std::int32_t> place(tree.nodes.size(), -1);  // in the part
  for (std::size_t i = 0; i < tree.nodes.size(); ++i) {
    const PrefixNode& whole = tree.nodes[i];
    PrefixNode node;
    node.leaf_begin = before(whole.leaf_begin), node.leaf_end = before(whole.leaf_end);
    if (node.multiplicity() == 0) continue;
    node.parent = whole.parent, node.begin = whole.begin, node.end = whole.end;
    node.rollout = part.leaf_order[static_cast<std::size_t>(node.leaf_begin)];
    for (const std::int32_t rollout : whole.ends_here)
      if (std::ranges::binary_search(sorted, rollout)) node.ends_here.push_back(rollout);
    node.parent = node.parent < 0 ? -1 : place[static_cast<std::size_t>(node.parent)];
    if (node.parent >= 0) {
      // Where all rollouts of a node go on to the same child, the two are one run.
      PrefixNode& above = part.nodes[static_cast<std::size_t>(node.parent)];
      if (above.multiplicity() == node.multiplicity()) {
        above.end = node.end, above.ends_here = std::move(node.ends_here);
        place[i] = node.parent;
        continue;
      }
      above.children.push_back(static_cast<std::int32_t>(part.nodes.size()));
    }
    place[i] = static_cast<std::int32_t>(part.nodes.size());
    part.nodes.push_back(std::move(node));
  }
  return part;
}

std::vector<PrefixTree> build_prefix_trees(std::span<const Rollout> rollouts, ShareMode mode) {
  ESPALIER_INTERNAL(rollouts.size() < (std::size_t{1} << 30), "trees of ", rollouts.size(), " rollouts");
  for (const Rollout& rollout : rollouts) ESPALIER_INTERNAL(!rollout.prompt_ids.empty(), rollout.where);
  if (mode == ShareMode::prompts) return prompt_trees(rollouts);
  if (mode == ShareMode::off) {
    std::vector<PrefixTree> trees;
    for (std::size_t i = 0; i < rollouts.size(); ++i)
      trees.push_back(single_node_tree(rollouts[i], static_cast<std::int32_t>(i)));
    return trees;
  }
  Forest forest(rollouts);
  for (std::size_t i = 0; i < rollouts.size(); ++i) forest.insert(static_cast<std::int32_t>(i));
  return std::move(forest).trees();
}

}  // namespace espalier
