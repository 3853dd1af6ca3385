// Prefix trees against what they mean, counted one token at a time.
#include "espalier/grouping/prefix_tree.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>
#include <set>
#include <string>

#include "espalier/base/random.h"
#include "tests/support/make_rollouts.h"

namespace espalier {
namespace {

using Ids = std::vector<std::int32_t>;

Rollout rollout(Ids prompt, Ids response) {
  Rollout out;
  out.prompt_ids = std::move(prompt);
  out.response_ids = std::move(response);
  return out;
}

Ids tokens_of(const Rollout& rollout) {
  Ids tokens = rollout.prompt_ids;
  tokens.insert(tokens.end(), rollout.response_ids.begin(), rollout.response_ids.end());
  return tokens;
}

// "[0,3) of 2 {ends} (children)": the whole tree in one line.
std::string drawn(const PrefixTree& tree, std::int32_t at = 0) {
  const PrefixNode& node = tree.nodes[static_cast<std::size_t>(at)];
  std::string out = std::to_string(node.begin) + "-" + std::to_string(node.end);
  if (!node.ends_here.empty()) {
    out += "{";
    for (const std::int32_t rollout : node.ends_here) out += std::to_string(rollout) + ",";
    out.back() = '}';
  }
  if (!node.children.empty()) {
    out += "(";
    for (const std::int32_t child : node.children) out += drawn(tree, child) + " ";
    out.back() = ')';
  }
  return out;
}

std::string drawn(const std::vector<PrefixTree>& forest) {
  std::string out;
  for (const PrefixTree& tree : forest) out += (out.empty() ? "" : " | ") + drawn(tree);
  return out;
}

std::string built(const std::vector<Rollout>& batch, ShareMode mode = ShareMode::whole_trees) {
  return drawn(build_prefix_trees(batch, mode));
}

// Expectations of every tree of every mode: structure, order, coverage.
void expect_well_formed(const std::vector<Rollout>& batch, const std::vector<PrefixTree>& forest) {
  std::multiset<std::int32_t> covered;
  std::int64_t logical = 0;
  std::int32_t last_first = -1;
  for (const PrefixTree& tree : forest) {
    ASSERT_FALSE(tree.nodes.empty());
    ASSERT_EQ(tree.nodes[0].parent, -1);
    ASSERT_EQ(tree.nodes[0].begin, 0);
    EXPECT_EQ(tree.nodes[0].leaf_begin, 0);
    EXPECT_EQ(tree.nodes[0].leaf_end, static_cast<std::int32_t>(tree.leaf_order.size()));
    covered.insert(tree.leaf_order.begin(), tree.leaf_order.end());
    const std::int32_t first = *std::min_element(tree.leaf_order.begin(), tree.leaf_order.end());
    EXPECT_GT(first, last_first) << "trees out of order";
    last_first = first;
    logical += tree.logical_tokens();

    std::int32_t next = 0;  // a depth-first walk meets the nodes in their order
    const auto walk = [&](const auto& self, std::int32_t at) -> void {
      ASSERT_EQ(at, next++);
      const PrefixNode& node = tree.nodes[static_cast<std::size_t>(at)];
      EXPECT_GT(node.length(), 0);
      EXPECT_FALSE(node.children.empty() && node.ends_here.empty());
      EXPECT_FALSE(node.children.size() == 1 && node.ends_here.empty()) << "a node that need not be";
      std::int32_t leaf = node.leaf_begin, last_child_first = -1;
      for (const std::int32_t rollout : node.ends_here) {
        EXPECT_EQ(tree.leaf_order[static_cast<std::size_t>(leaf++)], rollout);
        EXPECT_EQ(batch[static_cast<std::size_t>(rollout)].length(), node.end);
      }
      EXPECT_TRUE(std::is_sorted(node.ends_here.begin(), node.ends_here.end()));
      for (const std::int32_t child : node.children) {
        const PrefixNode& below = tree.nodes[static_cast<std::size_t>(child)];
        EXPECT_EQ(below.parent, at);
        EXPECT_EQ(below.begin, node.end);
        EXPECT_EQ(below.leaf_begin, leaf);
        leaf = below.leaf_end;
        const auto begin = tree.leaf_order.begin();
        const std::int32_t child_first = *std::min_element(begin + below.leaf_begin, begin + below.leaf_end);
        EXPECT_GT(child_first, last_child_first) << "children out of order";
        last_child_first = child_first;
        self(self, child);
      }
      EXPECT_EQ(leaf, node.leaf_end);
      bool rollout_is_below = false;
      for (std::int32_t i = node.leaf_begin; i < node.leaf_end; ++i) {
        const std::int32_t below = tree.leaf_order[static_cast<std::size_t>(i)];
        rollout_is_below |= below == node.rollout;
        for (std::int32_t depth = node.begin; depth < node.end; ++depth)
          ASSERT_EQ(batch[static_cast<std::size_t>(below)].token_at(depth),
                    batch[static_cast<std::size_t>(node.rollout)].token_at(depth));
      }
      EXPECT_TRUE(rollout_is_below);
    };
    walk(walk, 0);
    EXPECT_EQ(next, static_cast<std::int32_t>(tree.nodes.size()));
  }
  EXPECT_EQ(covered.size(), batch.size());
  EXPECT_EQ(std::set<std::int32_t>(covered.begin(), covered.end()).size(), batch.size());
  std::int64_t tokens = 0;
  for (const Rollout& rollout : batch) tokens += rollout.length();
  EXPECT_EQ(logical, tokens);
}

std::int64_t physical(const std::vector<PrefixTree>& forest) {
  return std::accumulate(forest.begin(), forest.end(), std::int64_t{0},
                         [](std::int64_t sum, const PrefixTree& tree) { return sum + tree.physical_tokens(); });
}

TEST(PrefixTree, AGroupIsATreeOfDepthOne) {
  EXPECT_EQ(built({rollout({1, 2, 3}, {4}), rollout({1, 2, 3}, {5, 6}), rollout({1, 2, 3}, {7})}),
            "0-3(3-4{0} 3-5{1} 3-4{2})");
}

TEST(PrefixTree, EqualRolloutsAndPrefixesEndAtInnerNodes) {
  EXPECT_EQ(built({rollout({1, 2}, {3, 4}), rollout({1, 2}, {3, 4})}), "0-4{0,1}");
  EXPECT_EQ(built({rollout({1, 2}, {3, 4}), rollout({1, 2}, {3})}), "0-3{1}(3-4{0})");
  EXPECT_EQ(built({rollout({1, 2}, {}), rollout({1, 2}, {3}), rollout({1, 2}, {})}), "0-2{0,2}(2-3{1})");
}

TEST(PrefixTree, TokensAreSharedWhereverThePromptEnds) {
  EXPECT_EQ(built({rollout({1, 2}, {3, 4}), rollout({1, 2, 3}, {5}), rollout({1}, {2, 3, 4})}), "0-3(3-4{0,2} 3-4{1})");
  EXPECT_EQ(built({rollout({1, 2, 3}, {9}), rollout({1, 2, 3, 4}, {9}), rollout({1, 2}, {8})}),
            "0-2(2-3(3-4{0} 3-5{1}) 2-3{2})");
}

TEST(PrefixTree, RolloutsThatShareNoFirstTokenAreApart) {
  EXPECT_EQ(built({rollout({2}, {1}), rollout({1}, {1}), rollout({2}, {2}), rollout({0}, {})}),
            "0-1(1-2{0} 1-2{2}) | 0-2{1} | 0-1{3}");
}

TEST(PrefixTree, ModesShareLess) {
  const std::vector<Rollout> batch = {rollout({1, 2}, {3, 4}), rollout({1, 2}, {3, 5}), rollout({1, 2, 3}, {6}),
                                      rollout({1, 2}, {}), rollout({1, 2}, {3, 4})};
  EXPECT_EQ(built(batch), "0-2{3}(2-3(3-4{0,4} 3-4{1} 3-4{2}))");
  EXPECT_EQ(built(batch, ShareMode::prompts), "0-2{3}(2-4{0} 2-4{1} 2-4{4}) | 0-4{2}");
  EXPECT_EQ(built(batch, ShareMode::off), "0-4{0} | 0-4{1} | 0-4{2} | 0-2{3} | 0-4{4}");
  EXPECT_TRUE(build_prefix_trees({}, ShareMode::whole_trees).empty());
}

TEST(PrefixTree, HoldsEveryDistinctPrefixOnce) {
  for (std::uint64_t seed = 0; seed < 400; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    const std::vector<Rollout> batch = testing::make_rollouts(testing::any_options(seed, 30), seed);
    const auto whole = build_prefix_trees(batch, ShareMode::whole_trees);
    expect_well_formed(batch, whole);
    std::set<Ids> prefixes;  // one token of the forest each
    std::set<std::int32_t> first_tokens;
    for (const Rollout& rollout : batch) {
      Ids prefix;
      for (const std::int32_t token : tokens_of(rollout)) {
        prefix.push_back(token);
        prefixes.insert(prefix);
      }
      first_tokens.insert(rollout.prompt_ids[0]);
    }
    EXPECT_EQ(physical(whole), static_cast<std::int64_t>(prefixes.size()));
    EXPECT_EQ(whole.size(), first_tokens.size());

    const auto prompts = build_prefix_trees(batch, ShareMode::prompts);
    expect_well_formed(batch, prompts);
    std::set<Ids> distinct;
    std::int64_t expected = 0;
    for (const Rollout& rollout : batch) {
      expected += rollout.response_length();
      if (distinct.insert(rollout.prompt_ids).second) expected += rollout.prompt_length();
    }
    EXPECT_EQ(physical(prompts), expected);
    EXPECT_EQ(prompts.size(), distinct.size());

    const auto apart = build_prefix_trees(batch, ShareMode::off);
    expect_well_formed(batch, apart);
    EXPECT_EQ(apart.size(), batch.size());
    if (::testing::Test::HasFailure()) break;
  }
}

TEST(PrefixTree, ALongChainOfTurnsNeedsNoStack) {
  // Each rollout continues the one before by a token: a chain of 20,000 nodes, given longest last, first and mixed.
  constexpr std::int32_t kTurns = 20'000;
  std::vector<Rollout> batch;
  Ids response;
  for (std::int32_t turn = 0; turn < kTurns; ++turn) {
    if (turn % 100 == 0) batch.push_back(rollout({1}, response));
    response.push_back(turn % 7);
  }
  for (const int order : {0, 1, 2}) {
    if (order == 1) std::reverse(batch.begin(), batch.end());
    if (order == 2) {
      Random random(5);
      for (std::size_t i = batch.size(); i > 1; --i)
        std::swap(batch[i - 1], batch[static_cast<std::size_t>(random.integer(0, static_cast<std::int64_t>(i) - 1))]);
    }
    const auto forest = build_prefix_trees(batch, ShareMode::whole_trees);
    ASSERT_EQ(forest.size(), 1u);
    EXPECT_EQ(forest[0].nodes.size(), batch.size());
    EXPECT_EQ(forest[0].physical_tokens(), kTurns - 100 + 1);
  }
}

TEST(PrefixTree, AWideForkIsFoundByHash) {
  std::vector<Rollout> batch;
  constexpr std::int32_t kWide = 50'000;
  for (std::int32_t i = 0; i < kWide; ++i) batch.push_back(rollout({1, 2, 3}, {i, 1}));
  for (std::int32_t i = 0; i < kWide; ++i) batch.push_back(rollout({1, 2, 3}, {kWide - 1 - i, 2}));
  const auto forest = build_prefix_trees(batch, ShareMode::whole_trees);
  ASSERT_EQ(forest.size(), 1u);
  EXPECT_EQ(forest[0].nodes.size(), 1u + 3u * kWide);
  EXPECT_EQ(forest[0].nodes[0].children.size(), static_cast<std::size_t>(kWide));
  EXPECT_EQ(forest[0].physical_tokens(), 3 + 3 * kWide);
}

// [tokens, 1 layer, 1 expert]
Rollout routed(Ids prompt, Ids response, std::vector<std::uint16_t> experts) {
  Rollout out = rollout(std::move(prompt), std::move(response));
  out.recorded_experts = {static_cast<std::int32_t>(experts.size()), 1, 1, std::move(experts)};
  return out;
}

TEST(PrefixTree, TokensWithOtherRecordedExpertsAreOtherTokens) {
  constexpr std::uint16_t kFree = RecordedExperts::kFree;
  const Rollout base = routed({1, 2, 3}, {4, 5}, {7, 8, 9, 1});
  EXPECT_EQ(built({base, routed({1, 2, 3}, {4, 6}, {7, 8, 9, 1})}), "0-4(4-5{0} 4-5{1})");
  EXPECT_EQ(built({base, routed({1, 2, 3}, {4, 5}, {7, 8, 6, 1})}), "0-2(2-5{0} 2-5{1})");  // the third prompt token
  EXPECT_EQ(built({base, routed({1, 2, 3}, {4, 5}, {6, 8, 9, 1})}), "0-5{0} | 0-5{1}");
  // A token without a record is another one than with one; two without are the same.
  EXPECT_EQ(built({base, rollout({1, 2, 3}, {4, 5})}), "0-5{0} | 0-5{1}");
  EXPECT_EQ(built({base, routed({1, 2, 3}, {4, 5}, {7, kFree, 9, 1})}), "0-1(1-5{0} 1-5{1})");
  EXPECT_EQ(built({routed({1, 2}, {4}, {kFree, 8}), routed({1, 2}, {5}, {kFree, 8})}), "0-2(2-3{0} 2-3{1})");
  // The last token of a rollout has no record; where another goes on it may.
  EXPECT_EQ(built({base, routed({1, 2, 3}, {4}, {7, 8, 9})}), "0-3(3-5{0} 3-4{1})");
}

TEST(PrefixTree, EqualPromptsWithOtherRecordsAreNotSharedAsPrompts) {
  const std::vector<Rollout> batch = {routed({1, 2}, {4}, {7, 8}), routed({1, 2}, {5}, {7, 8}),
                                      routed({1, 2}, {6}, {7, 9}), rollout({1, 2}, {6})};
  EXPECT_EQ(built(batch, ShareMode::prompts), "0-2(2-3{0} 2-3{1}) | 0-3{2} | 0-3{3}");
}

TEST(PrefixTree, APartIsTheTreeOfItsRollouts) {
  testing::RolloutOptions options;
  options.groups = 2, options.group_size = {5, 7};
  options.shared_start = 0.5, options.equal_response = 0.2, options.empty_response = 0.2, options.continues = 0.3;
  for (std::uint64_t seed = 1; seed <= 4; ++seed) {
    const std::vector<Rollout> batch = testing::make_rollouts(options, seed);
    for (const ShareMode mode : {ShareMode::whole_trees, ShareMode::prompts})
      for (const PrefixTree& tree : build_prefix_trees(batch, mode)) {
        const auto leaves = static_cast<std::int32_t>(tree.leaf_order.size());
        for (std::int32_t begin = 0; begin < leaves; ++begin)
          for (std::int32_t end = begin + 1; end <= leaves; ++end) {
            std::vector<std::int32_t> places(static_cast<std::size_t>(end - begin));
            std::iota(places.begin(), places.end(), begin);
            const PrefixTree part = part_of(tree, places);
            std::vector<Rollout> own;
            for (std::int32_t leaf = begin; leaf < end; ++leaf) {
              EXPECT_EQ(part.leaf_order[static_cast<std::size_t>(leaf - begin)],
                        tree.leaf_order[static_cast<std::size_t>(leaf)]);
              own.push_back(batch[static_cast<std::size_t>(tree.leaf_order[static_cast<std::size_t>(leaf)])]);
            }
            const std::vector<PrefixTree> built = build_prefix_trees(own, mode);
            ASSERT_EQ(built.size(), 1u);
            EXPECT_EQ(part.nodes.size(), built[0].nodes.size()) << drawn(part) << " and " << drawn(built[0]);
            EXPECT_EQ(part.physical_tokens(), built[0].physical_tokens());
            EXPECT_EQ(part.logical_tokens(), built[0].logical_tokens());
          }
      }
  }
}

// Turns of one trajectory as an agent records them: each prompt is the former prompt, its response and `tool` tokens.
// The tokens after `header` are `first`, first + 1, and so on.
std::vector<Rollout> turns_of(const Ids& header, std::int32_t first, int turns, int response, int tool) {
  std::vector<Rollout> out;
  Ids history = header;
  const auto next = [&first](int n) {
    Ids tokens(static_cast<std::size_t>(n));
    std::iota(tokens.begin(), tokens.end(), first);
    first += n;
    return tokens;
  };
  for (int turn = 0; turn < turns; ++turn) {
    out.push_back(rollout(history, next(response)));
    history.insert(history.end(), out.back().response_ids.begin(), out.back().response_ids.end());
    const Ids observed = next(tool);
    history.insert(history.end(), observed.begin(), observed.end());
  }
  return out;
}

TEST(PrefixTree, ATurnsHistoryIsSharedAndAnEditedOneUpToTheEdit) {
  std::vector<Rollout> batch = turns_of({1, 2}, 10, 3, 2, 1);
  EXPECT_EQ(built(batch), "0-4{0}(4-7{1}(7-10{2}))");
  batch[2].prompt_ids[4] = 99;  // the first observation, folded away
  EXPECT_EQ(built(batch), "0-4{0}(4-7{1} 4-10{2})");
}

TEST(PrefixTree, AThousandTurnsAreAThousandNodesBelowEachOther) {
  constexpr int kTurns = 1000;
  std::vector<Rollout> batch = turns_of({1, 2}, 10, kTurns, 2, 1);
  const std::int64_t deepest = batch.back().length();
  for (int turn = 0; turn < kTurns; ++turn)  // another answer to each turn: the chain forks at every node
    batch.push_back(rollout(batch[static_cast<std::size_t>(turn)].prompt_ids, {5}));
  const std::vector<PrefixTree> forest = build_prefix_trees(batch, ShareMode::whole_trees);
  expect_well_formed(batch, forest);
  ASSERT_EQ(forest.size(), 1u);
  EXPECT_EQ(forest[0].physical_tokens(), deepest + kTurns);
  int depth = 0;
  for (std::int32_t at = 0; at >= 0;) {
    const auto& children = forest[0].nodes[static_cast<std::size_t>(at)].children;
    at = children.empty() ? -1 : children.front();
    ++depth;
  }
  EXPECT_EQ(depth, 2 * kTurns);  // in each turn a history, below it the answer
}

TEST(PrefixTree, AMillionUniqueRowsOfTenThousandTurnsStandOnce) {
  constexpr int kTrajectories = 1000, kTurns = 10;
  Ids header(1000);
  std::iota(header.begin(), header.end(), 0);
  std::vector<Rollout> batch;
  for (int trajectory = 0; trajectory < kTrajectories; ++trajectory)
    for (Rollout& turn : turns_of(header, 1000 * (trajectory + 1), kTurns, 99, 1)) batch.push_back(std::move(turn));
  const std::vector<PrefixTree> forest = build_prefix_trees(batch, ShareMode::whole_trees);
  ASSERT_EQ(forest.size(), 1u);
  EXPECT_EQ(forest[0].physical_tokens(), 1'000'000);  // 1,000 of the header; 9 x 100 + 99 of each trajectory
  EXPECT_EQ(forest[0].logical_tokens(), 15'490'000);  // 1,000 trajectories of 10 x (1,000 + 99) + 100 x (0 + ... + 9)
  EXPECT_EQ(forest[0].nodes.size(), 1u + kTrajectories * kTurns);
}

}  // namespace
}  // namespace espalier
