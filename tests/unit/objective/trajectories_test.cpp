// Advantages and value targets of agents' turns, by docs/objectives.md (1) to (8) over trajectories (docs/agents.md).
#include <gtest/gtest.h>

#include <cmath>
#include <vector>

#include "espalier/base/error.h"
#include "espalier/objective/objective.h"
#include "espalier/objective/value_loss.h"
#include "espalier/rollout/trajectories.h"
#include "rollout_examples.h"

namespace espalier {
namespace {

constexpr double kRoundingOfReturns = 1e-14;

Rollout turn(const char* trajectory, std::int64_t number, int tokens, std::optional<double> reward) {
  Rollout out = make_rollout(tokens);
  out.trajectory = trajectory, out.turn = number, out.reward = reward;
  out.where = "f:" + std::to_string(number + 1);
  return out;
}

Options estimator_of_trajectories(const std::string& name) {
  Options options;
  options.adv_estimator = name;
  return options;
}

// Three turns that repeat the outcome 1, one turn with 0: two trajectories, not four rollouts.
std::vector<Rollout> outcomes() {
  return {turn("1", 0, 2, 1.0), turn("2", 0, 1, 0.0), turn("1", 1, 1, 1.0), turn("1", 2, 3, 1.0)};
}

TEST(Trajectories, GroupStatisticsCountEachTrajectoryOnce) {
  std::vector<Rollout> rollouts = outcomes();
  EXPECT_NE(settle_turn_rewards(rollouts, TurnRewards::automatic).find("outcome"), std::string::npos);
  const auto advantages = compute_advantages(rollouts, estimator_of_trajectories("grpo"));
  const double unit = 0.5 / (std::sqrt(0.5) + 1e-6);
  for (const std::size_t i : {0u, 2u, 3u})
    for (const double advantage : advantages[i]) EXPECT_NEAR(advantage, unit, kRoundingOfReturns) << i;
  EXPECT_NEAR(advantages[1][0], -unit, kRoundingOfReturns);
  const auto leave_one_out = compute_advantages(rollouts, estimator_of_trajectories("rloo"));
  EXPECT_NEAR(leave_one_out[3][2], 1.0, kRoundingOfReturns);
  EXPECT_NEAR(leave_one_out[1][0], -1.0, kRoundingOfReturns);
}

TEST(Trajectories, OneTurnEachIsAFileWithoutTrajectories) {
  const std::vector<Rollout> plain = {make_rewarded(2, 0.3), make_rewarded(1, 0.9), make_rewarded(3, 0.1)};
  std::vector<Rollout> named = plain;
  for (std::size_t i = 0; i < named.size(); ++i) named[i].trajectory = std::to_string(i), named[i].turn = 0;
  EXPECT_EQ(settle_turn_rewards(named, TurnRewards::automatic), "");
  for (const char* name : {"grpo", "dr_grpo", "rloo", "reinforce_plus_plus", "reinforce_plus_plus_baseline"})
    EXPECT_EQ(compute_advantages(named, estimator_of_trajectories(name)),
              compute_advantages(plain, estimator_of_trajectories(name)))
        << name;
}

TEST(Trajectories, UnequalRewardsOfTurnsAreAdded) {
  std::vector<Rollout> rollouts = {turn("1", 0, 1, 0.25), turn("1", 1, 1, 1.0), turn("2", 0, 1, 0.5)};
  EXPECT_NE(settle_turn_rewards(rollouts, TurnRewards::automatic).find("sum"), std::string::npos);
  const auto advantages = compute_advantages(rollouts, estimator_of_trajectories("dr_grpo"));
  EXPECT_NEAR(advantages[0][0], 1.25 - 0.875, kRoundingOfReturns);
  EXPECT_NEAR(advantages[1][0], 1.25 - 0.875, kRoundingOfReturns);
  EXPECT_NEAR(advantages[2][0], 0.5 - 0.875, kRoundingOfReturns);
}

TEST(Trajectories, TheReadingOfRewardsCanBeSaid) {
  std::vector<Rollout> rollouts = outcomes();
  settle_turn_rewards(rollouts, TurnRewards::sum);
  EXPECT_EQ(rewards_of(rollouts, trajectories_of(rollouts)), (std::vector<std::optional<double>>{3.0, 0.0}));
  rollouts = {turn("1", 0, 1, 0.25), turn("1", 1, 1, 1.0)};
  try {
    settle_turn_rewards(rollouts, TurnRewards::outcome);
    FAIL() << "unequal outcomes of one trajectory";
  } catch (const InputError& error) {
    EXPECT_NE(std::string(error.what()).find("f:2: reward"), std::string::npos) << error.what();
  }
}

// Reward-to-go and GAE run through the turns: the same numbers as one rollout of all loss tokens has.
TEST(Trajectories, ReturnsAndGaeRunThroughTheTurns) {
  Rollout whole = make_rewarded(5, 2.0);
  whole.values = {0.1, -0.3, 0.7, 0.2, 0.4};
  std::vector<Rollout> turns = {turn("1", 1, 3, 2.0), turn("1", 0, 4, std::nullopt)};  // the later turn stands first
  turns[1].loss_mask = {1, 0, 0, 1};                                                   // two tokens of a tool
  turns[1].values = {0.1, 9, 9, -0.3};
  turns[0].values = {0.7, 0.2, 0.4};
  Options options = estimator_of_trajectories("gae");
  options.gamma = 0.9, options.lam = 0.8;
  for (const char* name : {"gae", "reinforce_plus_plus"}) {
    options.adv_estimator = name;
    const auto one = compute_advantages(std::vector{whole}, options)[0];
    const auto several = compute_advantages(turns, options);
    EXPECT_EQ(several[1], (std::vector<double>{one[0], 0, 0, one[1]})) << name;
    EXPECT_EQ(several[0], (std::vector<double>{one[2], one[3], one[4]})) << name;
  }
  const auto one = compute_value_targets(std::vector{whole}, options)[0];
  const auto several = compute_value_targets(turns, options);
  EXPECT_EQ(several[0], (std::vector<double>{one[2], one[3], one[4]}));
  EXPECT_EQ(several[1][0], one[0]);
  EXPECT_EQ(several[1][3], one[1]);
}

TEST(Trajectories, ARewardInTheMiddleReachesOnlyTheTokensBeforeIt) {
  std::vector<Rollout> rollouts = {turn("1", 0, 1, 1.0), turn("1", 1, 1, 0.5), turn("2", 0, 1, 0.0)};
  Options options = estimator_of_trajectories("gae");
  options.gamma = options.lam = 1;
  for (Rollout& rollout : rollouts) rollout.values = {0.0};
  const auto targets = compute_value_targets(rollouts, options);
  EXPECT_EQ(targets[0][0], 1.5);
  EXPECT_EQ(targets[1][0], 0.5);
  EXPECT_EQ(targets[2][0], 0.0);
}

TEST(Trajectories, NeedOneRewardAndItsTurnsOnce) {
  std::vector<Rollout> rollouts = {turn("1", 0, 1, std::nullopt), turn("1", 1, 1, 1.0)};
  EXPECT_NO_THROW(compute_advantages(rollouts, estimator_of_trajectories("grpo")));
  rollouts[1].reward.reset();
  EXPECT_THROW(compute_advantages(rollouts, estimator_of_trajectories("grpo")), InputError);
  rollouts[1].turn = 0;
  EXPECT_THROW(trajectories_of(rollouts), InputError);
  rollouts[1].turn.reset();
  EXPECT_THROW(trajectories_of(rollouts), InputError);
}

TEST(Trajectories, ATurnMayStandOnceOnEachBranch) {
  std::vector<Rollout> rollouts = {turn("1", 0, 1, 1.0), turn("1", 1, 1, 1.0), turn("1", 1, 1, 1.0)};
  rollouts[1].branch = "\"a\"", rollouts[2].branch = "\"b\"";
  EXPECT_EQ(trajectories_of(rollouts).turns, (std::vector<std::vector<std::int64_t>>{{0, 1, 2}}));
  rollouts[2].branch = rollouts[1].branch;
  try {
    trajectories_of(rollouts);
    FAIL() << "one turn twice on one branch";
  } catch (const InputError& error) {
    EXPECT_NE(std::string(error.what()).find("branch \"a\" here and at f:2"), std::string::npos) << error.what();
    EXPECT_NE(std::string(error.what()).find("add a field branch"), std::string::npos) << error.what();
  }
}

// Two branches of one run and another run: two votes, not three.
std::vector<Rollout> with_branches() {
  std::vector<Rollout> rollouts = {turn("1", 0, 2, 1.0), turn("1", 0, 3, 1.0), turn("2", 0, 1, 0.0)};
  rollouts[0].branch = "\"a\"", rollouts[1].branch = "\"b\"";
  return rollouts;
}

TEST(Trajectories, BranchesHaveOneVote) {
  std::vector<Rollout> rollouts = with_branches();
  EXPECT_NE(
      settle_turn_rewards(rollouts, TurnRewards::automatic).find("outcome, counted once, averaged over its branches"),
      std::string::npos);
  auto advantages = compute_advantages(rollouts, estimator_of_trajectories("dr_grpo"));
  EXPECT_EQ(advantages[0][0], 0.5);
  EXPECT_EQ(advantages[1][2], 0.5);
  EXPECT_EQ(advantages[2][0], -0.5);

  rollouts = with_branches();  // unequal branches: the trajectory has their mean
  rollouts[1].reward = 0.5;
  settle_turn_rewards(rollouts, TurnRewards::outcome);
  EXPECT_EQ(rewards_of(rollouts, trajectories_of(rollouts)), (std::vector<std::optional<double>>{0.75, 0.0}));

  rollouts = with_branches();  // a stem repeats the outcome of both branches
  rollouts.insert(rollouts.begin(), turn("1", -1, 1, 1.0));
  settle_turn_rewards(rollouts, TurnRewards::automatic);
  EXPECT_EQ(rewards_of(rollouts, trajectories_of(rollouts)), (std::vector<std::optional<double>>{1.0, 0.0}));
  settle_turn_rewards(rollouts, TurnRewards::automatic);  // a second time nothing changes
  EXPECT_EQ(rewards_of(rollouts, trajectories_of(rollouts)), (std::vector<std::optional<double>>{1.0, 0.0}));

  rollouts = with_branches();  // sums: that of the stem, and the mean of the branches' sums
  rollouts.insert(rollouts.begin(), turn("1", -1, 1, 0.25));
  settle_turn_rewards(rollouts, TurnRewards::automatic);
  EXPECT_EQ(rewards_of(rollouts, trajectories_of(rollouts)), (std::vector<std::optional<double>>{1.25, 0.0}));
}

TEST(Trajectories, ReturnsThroughBranchesAreRefusedByName) {
  std::vector<Rollout> rollouts = with_branches();
  for (Rollout& rollout : rollouts) rollout.values.assign(rollout.response_ids.size(), 0.0);
  for (const char* name : {"gae", "reinforce_plus_plus"})
    EXPECT_THROW(compute_advantages(rollouts, estimator_of_trajectories(name)), UnsupportedError) << name;
  EXPECT_THROW(compute_value_targets(rollouts, {}), UnsupportedError);
  for (Rollout& rollout : rollouts) rollout.returns.assign(rollout.response_ids.size(), 0.5);
  EXPECT_EQ(compute_value_targets(rollouts, {})[0][0], 0.5);
}

// slime: the samples of a rollout share one mean, 1/2 [(S1 + S2) / 8 + S3 / 4].
TEST(Trajectories, AreTheSequencesOfTheLossIfTheDumpSaysSo) {
  std::vector<Rollout> rollouts = {turn("1", 0, 6, std::nullopt), turn("1", 1, 2, std::nullopt),
                                   turn("2", 0, 4, std::nullopt)};
  const std::vector<std::vector<double>> advantages = {std::vector<double>(6, 1.0), {1, 1}, {1, 1, 1, 1}};
  Options options;
  options.policy_loss = "reinforce", options.loss_agg_mode = "seq-mean-token-mean", options.token_count_epsilon = 0;
  const auto slope_of = [&](int rollout) {
    return Objective(rollouts, advantages, options).add_token(rollout, 0, -1, 0).logprob;
  };
  EXPECT_DOUBLE_EQ(slope_of(0), -1.0 / 3 / 6);
  rollouts[0].loss_unit = LossUnit::trajectory;
  EXPECT_NE(settle_loss_unit(rollouts, LossUnit::automatic).find("one sequence"), std::string::npos);
  EXPECT_EQ(rollouts[2].loss_unit, LossUnit::trajectory);
  EXPECT_DOUBLE_EQ(slope_of(0), -1.0 / 2 / 8);
  EXPECT_DOUBLE_EQ(slope_of(1), -1.0 / 2 / 8);
  EXPECT_DOUBLE_EQ(slope_of(2), -1.0 / 2 / 4);
  options.loss_agg_mode = "seq-mean-token-sum";
  EXPECT_DOUBLE_EQ(slope_of(1), -1.0 / 2);
  options.loss_unit = "record";  // a given unit overrides the dump's
  EXPECT_DOUBLE_EQ(slope_of(1), -1.0 / 3);
  rollouts[2].loss_unit = LossUnit::record;
  EXPECT_THROW(settle_loss_unit(rollouts, LossUnit::automatic), InputError);
  EXPECT_EQ(settle_loss_unit(rollouts, LossUnit::record), "");
}

TEST(Trajectories, StandInTheirGroupAndStep) {
  std::vector<Rollout> rollouts = {turn("1", 0, 1, 1.0), turn("1", 0, 1, 1.0)};
  rollouts[1].group = "\"b\"";
  EXPECT_EQ(trajectories_of(rollouts).turns.size(), 2u);
  rollouts[1].group = rollouts[0].group;
  rollouts[0].step = 1, rollouts[1].step = 2;
  EXPECT_EQ(trajectories_of(rollouts).turns.size(), 2u);
}

}  // namespace
}  // namespace espalier
