// Advantages against numbers worked out by hand from docs/objectives.md (1) to (8).
#include <gtest/gtest.h>

#include <cmath>
#include <vector>

#include "espalier/base/error.h"
#include "espalier/objective/objective.h"
#include "espalier/objective/value_loss.h"
#include "rollout_examples.h"

namespace espalier {
namespace {

// A double chain of a handful of operations on numbers near 1: a few units in the last place.
constexpr double kRounding = 1e-14;

Options with_estimator(const std::string& name) {
  Options options;
  options.adv_estimator = name;
  return options;
}

TEST(Advantages, GrpoDividesByTheUnbiasedDeviation) {
  const std::vector<Rollout> rollouts = {make_rewarded(1, 1.0), make_rewarded(2, 0.0), make_rewarded(1, 0.5)};
  const auto advantages = compute_advantages(rollouts, with_estimator("grpo"));
  const double unit = 0.5 / (0.5 + 1e-6);  // mean 0.5, deviation sqrt((0.25 + 0.25 + 0) / 2)
  ASSERT_EQ(advantages.size(), 3u);
  EXPECT_NEAR(advantages[0].at(0), unit, kRounding);
  ASSERT_EQ(advantages[1].size(), 2u);
  EXPECT_NEAR(advantages[1][0], -unit, kRounding);
  EXPECT_NEAR(advantages[1][1], -unit, kRounding);
  EXPECT_NEAR(advantages[2].at(0), 0.0, kRounding);
}

TEST(Advantages, GroupsOfOneKeepTheirReward) {
  const std::vector<Rollout> rollouts = {make_rewarded(1, 0.75, "\"a\""), make_rewarded(1, 3.0, "\"b\"")};
  for (const char* name : {"dr_grpo", "rloo"}) {
    const auto advantages = compute_advantages(rollouts, with_estimator(name));
    EXPECT_EQ(advantages[0].at(0), 0.75) << name;
    EXPECT_EQ(advantages[1].at(0), 3.0) << name;
  }
  const auto grpo = compute_advantages(rollouts, with_estimator("grpo"));
  EXPECT_NEAR(grpo[0].at(0), 0.75 / (1 + 1e-6), kRounding);
}

// TRL's trainers: the mean of a group of one is its reward.
TEST(Advantages, GroupsOfOneHaveNoneIfAskedFor) {
  const std::vector<Rollout> rollouts = {make_rewarded(1, 0.75, "\"a\""), make_rewarded(1, 3.0, "\"b\"")};
  for (const char* name : {"grpo", "dr_grpo", "rloo"})
    for (const char* deviation : {"group", "batch"}) {
      Options options = with_estimator(name);
      options.group_of_one = "zero", options.adv_std = deviation;
      for (const auto& series : compute_advantages(rollouts, options)) EXPECT_EQ(series.at(0), 0.0) << name;
    }
}

// TRL's unscorable completions: no part in the statistics, advantage 0.
TEST(Advantages, RolloutsThatNobodyJudgedHaveNone) {
  const std::vector<Rollout> rollouts = {make_rewarded(1, 1.0), make_rollout(2), make_rewarded(1, 0.0),
                                         make_rewarded(1, 5.0, "\"b\""), make_rollout(1, "\"b\"")};
  EXPECT_EQ(count_unjudged(rollouts), 2);
  const auto grpo = compute_advantages(rollouts, with_estimator("grpo"));
  const double unit = 0.5 / (std::sqrt(0.5) + 1e-6);
  EXPECT_NEAR(grpo[0].at(0), unit, kRounding);
  EXPECT_EQ(grpo[1], (std::vector<double>{0, 0}));
  EXPECT_NEAR(grpo[2].at(0), -unit, kRounding);
  EXPECT_EQ(grpo[3].at(0), 0.0);  // alone among the judged of its group: nothing to compare
  EXPECT_EQ(grpo[4].at(0), 0.0);
  const auto rloo = compute_advantages(rollouts, with_estimator("rloo"));
  EXPECT_EQ(rloo[0].at(0), 1.0);  // 2 / 1 * 0.5
  EXPECT_EQ(rloo[3].at(0), 0.0);
  const auto whitened = compute_advantages(rollouts, with_estimator("reinforce_plus_plus_baseline"));
  EXPECT_EQ(whitened[1], (std::vector<double>{0, 0}));
  EXPECT_NEAR(whitened[0].at(0), 0.5 / std::sqrt(0.25 + 1e-8), kRounding);  // over 0.5, -0.5 and 0
  EXPECT_THROW(compute_advantages(rollouts, with_estimator("gae")), InputError);
  EXPECT_THROW(compute_advantages(std::vector{make_rollout(1), make_rollout(2)}, with_estimator("grpo")), InputError);
}

// verl's token_level_rewards: each at its token; one at a masked token belongs to the loss token before it.
TEST(Advantages, RewardsOfTokensStandWhereTheyWereGiven) {
  std::vector<Rollout> rollouts = {make_rewarded(4, 1.5)};
  rollouts[0].token_rewards = {0.25, 1.0, 0.0, 0.25};
  rollouts[0].loss_mask = {1, 0, 1, 1};
  rollouts[0].values = {0, 0, 0, 0};
  Options options = with_estimator("gae");
  options.gamma = 0.5;
  const auto targets = compute_value_targets(rollouts, options);
  EXPECT_EQ(targets[0], (std::vector<double>{1.25 + 0.5 * (0.5 * 0.25), 0, 0.5 * 0.25, 0.25}));
  EXPECT_EQ(compute_advantages(rollouts, with_estimator("dr_grpo"))[0][0], 1.5);
}

TEST(Advantages, EqualRewardsGiveExactlyZero) {
  const std::vector<Rollout> rollouts(3, make_rewarded(2, 0.1));
  for (const char* name : {"grpo", "dr_grpo", "rloo", "reinforce_plus_plus_baseline"})
    for (const auto& series : compute_advantages(rollouts, with_estimator(name)))
      for (double advantage : series) EXPECT_EQ(advantage, 0.0) << name;
}

TEST(Advantages, DrGrpoAndRlooSubtractTheMean) {
  const std::vector<Rollout> rollouts = {make_rewarded(1, 1.0), make_rewarded(1, 0.0), make_rewarded(1, 0.5)};
  const auto centred = compute_advantages(rollouts, with_estimator("dr_grpo"));
  const auto leave_one_out = compute_advantages(rollouts, with_estimator("rloo"));
  EXPECT_NEAR(centred[0][0], 0.5, kRounding);
  EXPECT_NEAR(centred[1][0], -0.5, kRounding);
  EXPECT_NEAR(leave_one_out[0][0], 1.0 - (0.0 + 0.5) / 2, kRounding);  // reward less the mean of the others
  EXPECT_NEAR(leave_one_out[1][0], 0.0 - (1.0 + 0.5) / 2, kRounding);
  EXPECT_NEAR(leave_one_out[2][0], 0.0, kRounding);
}

TEST(Advantages, GroupsMayStandAnywhereAndAreKeptApart) {
  const std::vector<Rollout> rollouts = {make_rewarded(1, 1.0, "\"a\""), make_rewarded(1, 10.0, "\"b\""),
                                         make_rewarded(1, 3.0, "\"a\""), make_rewarded(1, 14.0, "\"b\"")};
  const auto advantages = compute_advantages(rollouts, with_estimator("dr_grpo"));
  EXPECT_EQ(advantages[0][0], -1.0);
  EXPECT_EQ(advantages[1][0], -2.0);
  EXPECT_EQ(advantages[2][0], 1.0);
  EXPECT_EQ(advantages[3][0], 2.0);
}

TEST(Advantages, EqualPromptsFormAGroupWhereNoneIsGiven) {
  std::vector<Rollout> rollouts = {make_rewarded(1, 1.0, ""), make_rewarded(1, 10.0, ""), make_rewarded(1, 3.0, "")};
  rollouts[1].prompt_ids = {1, 7};
  const auto advantages = compute_advantages(rollouts, with_estimator("dr_grpo"));
  EXPECT_EQ(advantages[0][0], -1.0);
  EXPECT_EQ(advantages[1][0], 10.0);
  EXPECT_EQ(advantages[2][0], 1.0);
}

TEST(Advantages, RewardsOfEmptyAndMaskedRolloutsCountInTheGroup) {
  std::vector<Rollout> rollouts = {make_rewarded(1, 3.0), make_rewarded(0, 0.0), make_rewarded(2, 0.0)};
  rollouts[2].loss_mask = {0, 0};
  const auto advantages = compute_advantages(rollouts, with_estimator("dr_grpo"));
  EXPECT_EQ(advantages[0][0], 2.0);
  EXPECT_TRUE(advantages[1].empty());
  EXPECT_EQ(advantages[2], (std::vector<double>{0.0, 0.0}));
}

TEST(Advantages, ReinforcePlusPlusDiscountsOverLossTokensAndWhitens) {
  std::vector<Rollout> rollouts = {make_rewarded(3, 1.0), make_rewarded(2, 0.0)};
  rollouts[0].loss_mask = {1, 0, 1};
  rollouts[1].loss_mask = {1, 0};
  Options options = with_estimator("reinforce_plus_plus");
  options.gamma = 0.5;
  const auto advantages = compute_advantages(rollouts, options);
  // Returns of the three loss tokens: 0.5, 1, 0. Mean 0.5, variance (0 + 0.25 + 0.25) / 2.
  const double unit = 0.5 / std::sqrt(0.25 + 1e-8);
  EXPECT_NEAR(advantages[0][0], 0.0, kRounding);
  EXPECT_EQ(advantages[0][1], 0.0);
  EXPECT_NEAR(advantages[0][2], unit, kRounding);
  EXPECT_NEAR(advantages[1][0], -unit, kRounding);
  EXPECT_EQ(advantages[1][1], 0.0);
}

TEST(Advantages, ReinforcePlusPlusBaselineWhitensCentredRewardsOverTokens) {
  const std::vector<Rollout> rollouts = {make_rewarded(3, 1.0), make_rewarded(1, 0.0)};
  const auto advantages = compute_advantages(rollouts, with_estimator("reinforce_plus_plus_baseline"));
  // Tokens 0.5, 0.5, 0.5, -0.5: mean 0.25, variance (3 * 0.0625 + 0.5625) / 3 = 0.25.
  const double scale = 1 / std::sqrt(0.25 + 1e-8);
  EXPECT_NEAR(advantages[0][2], 0.25 * scale, kRounding);
  EXPECT_NEAR(advantages[1][0], -0.75 * scale, kRounding);
}

TEST(Advantages, GaeSkipsObservationTokens) {
  std::vector<Rollout> rollouts = {make_rewarded(4, 1.0)};
  rollouts[0].loss_mask = {1, 1, 0, 1};
  rollouts[0].values = {0.5, 0.2, 0.7, 0.4};
  Options options = with_estimator("gae");
  options.gamma = 0.9;
  options.lam = 0.8;
  const auto advantages = compute_advantages(rollouts, options);
  // delta: 0.6 at t = 3; 0.9 * 0.4 - 0.2 = 0.16 at t = 1; 0.9 * 0.2 - 0.5 = -0.32 at t = 0; gamma * lam = 0.72.
  const double a3 = 0.6, a1 = 0.16 + 0.72 * a3, a0 = -0.32 + 0.72 * a1;
  const double mean = (a0 + a1 + a3) / 3;
  const double variance = ((a0 - mean) * (a0 - mean) + (a1 - mean) * (a1 - mean) + (a3 - mean) * (a3 - mean)) / 2;
  const double scale = 1 / std::sqrt(variance + 1e-8);
  EXPECT_NEAR(advantages[0][0], (a0 - mean) * scale, kRounding);
  EXPECT_NEAR(advantages[0][1], (a1 - mean) * scale, kRounding);
  EXPECT_EQ(advantages[0][2], 0.0);
  EXPECT_NEAR(advantages[0][3], (a3 - mean) * scale, kRounding);
}

TEST(Advantages, WhiteningOneTokenOrNoneGivesZeroAndNoNan) {
  std::vector<Rollout> one = {make_rewarded(1, 5.0)};
  EXPECT_EQ(compute_advantages(one, with_estimator("reinforce_plus_plus"))[0][0], 0.0);
  one[0].loss_mask = {0};
  EXPECT_EQ(compute_advantages(one, with_estimator("reinforce_plus_plus"))[0][0], 0.0);
  EXPECT_TRUE(compute_advantages({}, with_estimator("gae")).empty());
}

TEST(Advantages, WhiteningEqualNumbersGivesZeros) {
  // A plain sum of twelve of them divided by twelve is another number, and the root of 1e-8 makes 1e4 of the
  // difference.
  const std::vector<Rollout> one = {make_rewarded(12, 147.0743517333712)};
  EXPECT_EQ(compute_advantages(one, with_estimator("reinforce_plus_plus"))[0], std::vector<double>(12, 0.0));
}

TEST(Advantages, GivenOnesWinOverTheReward) {
  std::vector<Rollout> rollouts = {make_rewarded(2, 1.0), make_rewarded(1, 3.0)};
  rollouts[0].advantages = {0.25, -4.0};
  const auto advantages = compute_advantages(rollouts, with_estimator("dr_grpo"));
  EXPECT_EQ(advantages[0], (std::vector<double>{0.25, -4.0}));
  EXPECT_EQ(advantages[1], (std::vector<double>{1.0}));  // mean 2: the first one's reward still counts
}

}  // namespace
}  // namespace espalier
