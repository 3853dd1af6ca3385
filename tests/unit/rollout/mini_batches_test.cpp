#include "espalier/rollout/mini_batches.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <set>

#include "tests/support/make_rollouts.h"
#include "tests/unit/rollout/expect_error.h"

namespace espalier {
namespace {

using Batches = std::vector<std::vector<std::int64_t>>;
using Groups = std::vector<std::int64_t>;

Rollout rollout(std::vector<std::int32_t> prompt, std::string group = {}, std::optional<std::int64_t> step = {}) {
  Rollout out;
  out.prompt_ids = std::move(prompt);
  out.group = std::move(group);
  out.step = step;
  out.where = "f:9";
  return out;
}

TEST(GroupOf, GoesByNameWhereGivenAndByPromptElsewhere) {
  const std::vector<Rollout> rollouts = {rollout({1, 2}), rollout({1, 2}, "\"a\""), rollout({3}, "\"a\""),
                                         rollout({1, 2}), rollout({1, 2}, "1"),     rollout({1, 2}, "\"1\""),
                                         rollout({1})};
  EXPECT_EQ(group_of(rollouts), (Groups{0, 1, 1, 0, 2, 3, 4}));
}

TEST(GroupOf, NeverSpansStepsWhereAllHaveOne) {
  EXPECT_EQ(group_of(std::vector{rollout({1}, "0", 1), rollout({1}, "0", 2), rollout({1}, "0", 1)}), (Groups{0, 1, 0}));
  EXPECT_EQ(group_of(std::vector{rollout({1}, "0", 1), rollout({1}, "0"), rollout({1}, "0", 2)}), (Groups{0, 0, 0}));
}

TEST(GroupOf, TurnsWithoutAGroupGoByTheFirstTurnsPrompt) {
  std::vector<Rollout> rollouts = {rollout({1, 2, 3}), rollout({1}), rollout({1}), rollout({1, 5}), rollout({2})};
  for (const std::size_t i : {0u, 2u}) rollouts[i].trajectory = "\"a\"", rollouts[i].turn = i == 0 ? 1 : 0;
  for (const std::size_t i : {1u, 3u}) rollouts[i].trajectory = "\"b\"";
  EXPECT_EQ(group_of(rollouts), (Groups{0, 0, 0, 0, 1}));
}

TEST(MiniBatches, FollowTheStepsInAscendingOrder) {
  const std::vector<Rollout> rollouts = {rollout({1}, "", 5), rollout({1}, "", -1), rollout({2}, "", 5),
                                         rollout({1}, "", 2)};
  EXPECT_EQ(cut_mini_batches(rollouts, 1), (Batches{{1}, {3}, {0, 2}}));
}

TEST(MiniBatches, RefuseStepsInSomeRecordsOnly) {
  testing::expect_error<InputError>(
      [] {
        cut_mini_batches(std::vector{rollout({1}, "", 5), rollout({1})}, 0);
      },
      "f:9: step", "a step in every record or in none");
  EXPECT_THROW(cut_mini_batches(std::vector{rollout({1})}, -1), OptionError);
}

TEST(MiniBatches, FillUpWithWholeGroups) {
  // Groups a (3), b (1), c (2), d (5) interleaved.
  std::vector<Rollout> rollouts;
  for (const char name : std::string("abacacddddd")) rollouts.push_back(rollout({1}, std::string(1, name)));
  EXPECT_EQ(cut_mini_batches(rollouts, 4), (Batches{{0, 1, 2, 4}, {3, 5}, {6, 7, 8, 9, 10}}));
  EXPECT_EQ(cut_mini_batches(rollouts, 1), (Batches{{0, 2, 4}, {1}, {3, 5}, {6, 7, 8, 9, 10}}));
  EXPECT_EQ(cut_mini_batches(rollouts, 0), (Batches{{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10}}));
  EXPECT_TRUE(cut_mini_batches({}, 4).empty());
}

TEST(MiniBatchNote, SaysWhatBecameOfASizeThatGroupsDoNotFill) {
  std::vector<Rollout> rollouts;
  for (int i = 0; i < 40; ++i) rollouts.push_back(rollout({1}, std::to_string(i / 8)));
  const auto note = [&](std::int64_t size) {
    return mini_batch_note(rollouts, cut_mini_batches(rollouts, size), size);
  };
  EXPECT_EQ(note(10), "--mini-batch-size 10: a group is never split, so mini-batches hold 8 rollouts (5 in all)");
  EXPECT_EQ(note(3), "--mini-batch-size 3: a group is never split, so mini-batches hold 8 rollouts (5 in all)");
  EXPECT_EQ(note(100), "--mini-batch-size 100 is more than the 40 rollouts, which form one mini-batch");
  for (const std::int64_t as_asked : {0, 8, 16, 40}) EXPECT_EQ(note(as_asked), "") << as_asked;  // 16: the last has 8
  for (Rollout& each : rollouts) each.step = 1;
  EXPECT_EQ(note(8), "--mini-batch-size 8 is not used, because every record has a step: 1 in all");
}

TEST(MiniBatches, HoldEveryRolloutOnceAndSplitNoGroup) {
  for (std::uint64_t seed = 0; seed < 100; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    const std::vector<Rollout> rollouts = testing::make_rollouts(testing::any_options(seed), seed);
    const std::vector<std::int64_t> group = group_of(rollouts);
    const std::int64_t size = static_cast<std::int64_t>(seed % 9);
    std::map<std::int64_t, std::size_t> batch_of_group;
    std::multiset<std::int64_t> held;
    const Batches batches = cut_mini_batches(rollouts, size);
    for (std::size_t b = 0; b < batches.size(); ++b) {
      EXPECT_TRUE(std::is_sorted(batches[b].begin(), batches[b].end()));
      std::set<std::int64_t> groups;
      for (const std::int64_t i : batches[b]) {
        held.insert(i);
        groups.insert(group[static_cast<std::size_t>(i)]);
        EXPECT_EQ(batch_of_group.try_emplace(group[static_cast<std::size_t>(i)], b).first->second, b);
      }
      if (size > 0 && static_cast<std::int64_t>(batches[b].size()) > size) {
        EXPECT_EQ(groups.size(), 1u);
      }
    }
    EXPECT_EQ(held.size(), rollouts.size());
    EXPECT_EQ(std::set<std::int64_t>(held.begin(), held.end()).size(), rollouts.size());
  }
}

}  // namespace
}  // namespace espalier
