#include "espalier/loop/shaping.h"

#include <gtest/gtest.h>

namespace espalier {
namespace {

TEST(OverlongPenalty, FallsLinearlyInTheLastTokensBeforeTheLimit) {
  // Limit 20, buffer 4: free up to 16, then a quarter of the factor for each token.
  EXPECT_EQ(overlong_penalty(0, 20, 4, 1), 0);
  EXPECT_EQ(overlong_penalty(16, 20, 4, 1), 0);
  EXPECT_EQ(overlong_penalty(17, 20, 4, 1), -0.25);
  EXPECT_EQ(overlong_penalty(18, 20, 4, 1), -0.5);
  EXPECT_EQ(overlong_penalty(20, 20, 4, 1), -1);
  EXPECT_EQ(overlong_penalty(20, 20, 4, 0.5), -0.5);
}

TEST(OverlongPenalty, IsNoneWithoutABuffer) { EXPECT_EQ(overlong_penalty(20, 20, 0, 1), 0); }

std::vector<Rollout> rollouts(const std::vector<std::pair<std::string, double>>& rows) {
  std::vector<Rollout> out;
  for (const auto& [group, reward] : rows) {
    Rollout rollout;
    rollout.group = group;
    rollout.reward = reward;
    rollout.index = static_cast<std::int64_t>(out.size());
    out.push_back(rollout);
  }
  return out;
}

std::string groups_of(const std::vector<Rollout>& kept) {
  std::string out;
  for (const Rollout& r : kept) out += r.group;
  return out;
}

TEST(DynamicSampling, DropsGroupsOfEqualRewards) {
  std::vector<Rollout> kept;
  const auto dropped = keep_unequal_groups(
      rollouts({{"a", 1}, {"a", 1}, {"b", 0}, {"b", 1}, {"c", 0}, {"c", 0}, {"d", 0.5}, {"d", 0.25}}), 8, kept);
  EXPECT_EQ(dropped, 2);
  EXPECT_EQ(groups_of(kept), "bbdd");
  EXPECT_EQ(count_groups(kept), 2);
}

TEST(DynamicSampling, FillsUpOverSeveralSamplingsToTheGroupsThatAreWanted) {
  std::vector<Rollout> kept;
  EXPECT_EQ(keep_unequal_groups(rollouts({{"a", 1}, {"a", 0}, {"b", 1}, {"b", 1}}), 3, kept), 1);
  EXPECT_EQ(keep_unequal_groups(rollouts({{"c", 1}, {"c", 0}, {"d", 0}, {"d", 1}, {"e", 0}, {"e", 1}}), 3, kept), 0);
  EXPECT_EQ(groups_of(kept), "aaccdd");
}

TEST(DynamicSampling, AGroupOfOneHasNothingToCompareWith) {
  std::vector<Rollout> kept;
  EXPECT_EQ(keep_unequal_groups(rollouts({{"a", 1}, {"b", 0}}), 3, kept), 2);
  EXPECT_TRUE(kept.empty());
}

}  // namespace
}  // namespace espalier
