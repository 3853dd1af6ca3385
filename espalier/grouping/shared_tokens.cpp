#include "espalier/grouping/shared_tokens.h"

#include <algorithm>
#include <map>
#include <set>

#include "espalier/base/error.h"
#include "espalier/grouping/prefix_tree.h"
#include "espalier/rollout/trajectories.h"

namespace espalier {
namespace {

using Members = std::vector<std::int64_t>;

// The prefix trees of some rollouts by their ids alone; their leaves are places in `members`.
std::vector<PrefixTree> trees_of(std::span<const Rollout> rollouts, std::span<const std::int64_t> members,
                                 std::vector<Rollout>& copies) {
  copies.clear();
  for (const std::int64_t index : members) {
    Rollout& copy = copies.emplace_back();
    copy.prompt_ids = rollouts[static_cast<std::size_t>(index)].prompt_ids;
    copy.response_ids = rollouts[static_cast<std::size_t>(index)].response_ids;
  }
  return build_prefix_trees(copies, ShareMode::whole_trees);
}

// Calls visit(depth, places of the rollouts through it, in the order of members) for each token that the node has.
template <class Visit>
void for_each_token(const PrefixTree& tree, const PrefixNode& node, Visit visit) {
  std::vector<std::int32_t> through(tree.leaf_order.begin() + node.leaf_begin, tree.leaf_order.begin() + node.leaf_end);
  std::ranges::sort(through);
  for (std::int32_t depth = node.begin; depth < node.end; ++depth) visit(depth, through);
}

// The response position of a loss token at `depth`, or -1.
std::int32_t loss_position(const Rollout& rollout, std::int32_t depth) {
  const std::int32_t position = depth - rollout.prompt_length();
  return position >= 0 && rollout.loss_mask[static_cast<std::size_t>(position)] != 0 ? position : -1;
}

class Settling {
 public:
  Settling(std::span<Rollout> rollouts, SharedTokens choice) : rollouts_(rollouts), choice_(choice) {}

  void settle(const Members& turns) {
    const std::vector<std::string> branches = branches_of(rollouts_, turns);
    if (branches.size() == 1) {
      for (const RepeatedTokens& repeat : repeated_tokens(rollouts_, turns)) repeated_ += repeat.tokens;
      return;
    }
    ++trajectories_;
    if (choice_ == SharedTokens::average)
      for (const std::int64_t index : turns) {
        Rollout& rollout = at(index);
        rollout.loss_shares.assign(rollout.response_ids.size(), 1.0);
      }
    std::vector<Rollout> copies;
    for (const PrefixTree& tree : trees_of(rollouts_, turns, copies))
      for (const PrefixNode& node : tree.nodes) settle(turns, branches, tree, node);
  }

  std::vector<std::string> notes() const {
    const std::string common = text_of(tokens_, " sampled tokens are common to branches of a trajectory and ");
    std::vector<std::string> out;
    if (repeated_ > 0)
      out.push_back(text_of(repeated_,
                            " sampled tokens with loss are repeated in another record of their trajectory and train "
                            "again there (espalier inspect lists them); if the run branches, add a field branch"));
    if (trajectories_ == 0) return out;
    if (choice_ == SharedTokens::average)
      out.push_back(text_of("the loss of ", trajectories_, " trajectories is the mean over their branches"));
    else if (tokens_ > 0 && choice_ == SharedTokens::once)
      out.push_back(common + "train once, on the first branch that has them (--shared-tokens once)");
    else if (tokens_ > 0)
      out.push_back(common + "train once per branch (--shared-tokens each)");
    if (unequal_ > 0 && choice_ == SharedTokens::once)
      out.push_back(text_of(unequal_, " of them have another recorded advantage on another branch, which is not used"));
    return out;
  }

 private:
  Rollout& at(std::int64_t index) { return rollouts_[static_cast<std::size_t>(index)]; }

  void settle(const Members& turns, const std::vector<std::string>& branches, const PrefixTree& tree,
              const PrefixNode& node) {
    double share = 1;
    if (choice_ == SharedTokens::average) {
      std::set<std::string> on;
      for (std::int32_t leaf = node.leaf_begin; leaf < node.leaf_end; ++leaf)
        on.insert(at(turns[static_cast<std::size_t>(tree.leaf_order[static_cast<std::size_t>(leaf)])]).branch);
      if (!on.contains("")) share = static_cast<double>(on.size()) / static_cast<double>(branches.size());
    }
    std::vector<std::pair<std::int64_t, std::int32_t>> owners;  // records with the token's loss, and its position
    for_each_token(tree, node, [&](std::int32_t depth, const std::vector<std::int32_t>& through) {
      owners.clear();
      for (const std::int32_t place : through) {
        const std::int64_t index = turns[static_cast<std::size_t>(place)];
        if (const std::int32_t position = loss_position(at(index), depth); position >= 0)
          owners.emplace_back(index, position);
      }
      if (!owners.empty()) give(owners, share);
    });
  }

  void give(const std::vector<std::pair<std::int64_t, std::int32_t>>& owners, double share) {
    const auto advantage = [&](const auto& owner) {
      const std::vector<double>& recorded = at(owner.first).advantages;
      return recorded.empty() ? 0.0 : recorded[static_cast<std::size_t>(owner.second)];
    };
    tokens_ += owners.size() > 1;
    unequal_ +=
        std::ranges::any_of(owners, [&](const auto& owner) { return advantage(owner) != advantage(owners.front()); });
    for (std::size_t o = 0; o < owners.size(); ++o) {
      const auto position = static_cast<std::size_t>(owners[o].second);
      Rollout& rollout = at(owners[o].first);
      if (choice_ == SharedTokens::average)
        rollout.loss_shares[position] = share / static_cast<double>(owners.size());
      else if (choice_ == SharedTokens::once && o > 0)
        rollout.silence(position, Silenced::shared);
    }
  }

  std::span<Rollout> rollouts_;
  SharedTokens choice_;
  std::int64_t trajectories_ = 0, tokens_ = 0, unequal_ = 0;
  std::int64_t repeated_ = 0;  // in trajectories without branches
};

}  // namespace

std::vector<std::string> settle_shared_tokens(std::span<Rollout> rollouts, SharedTokens choice) {
  Settling settling(rollouts, choice);
  for (const Members& turns : trajectories_of(rollouts).turns)
    if (turns.size() > 1) settling.settle(turns);
  return settling.notes();
}

std::vector<RepeatedTokens> repeated_tokens(std::span<const Rollout> rollouts, std::span<const std::int64_t> members) {
  std::vector<Rollout> copies;
  std::map<std::pair<std::int32_t, std::int32_t>, std::int32_t> found;  // by place and earlier place
  for (const PrefixTree& tree : trees_of(rollouts, members, copies))
    for (const PrefixNode& node : tree.nodes) {
      if (node.multiplicity() == 1) continue;
      for_each_token(tree, node, [&](std::int32_t depth, const std::vector<std::int32_t>& through) {
        std::int32_t first = -1;
        for (const std::int32_t place : through) {
          const std::int64_t index = members[static_cast<std::size_t>(place)];
          if (loss_position(rollouts[static_cast<std::size_t>(index)], depth) < 0) continue;
          if (first < 0)
            first = place;
          else
            ++found[{place, first}];
        }
      });
    }
  std::vector<RepeatedTokens> out;
  for (const auto& [places, tokens] : found)
    out.push_back(
        {members[static_cast<std::size_t>(places.first)], members[static_cast<std::size_t>(places.second)], tokens});
  return out;
}

}  // namespace espalier
