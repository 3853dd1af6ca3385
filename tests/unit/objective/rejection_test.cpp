// Rejection by verl's words at numbers worked out by hand. tests/python/test_verl_names.py holds it against verl
// itself.
#include "espalier/objective/rejection.h"

#include <gtest/gtest.h>

#include <cmath>

#include "espalier/base/error.h"
#include "espalier/objective/objective.h"
#include "rollout_examples.h"

namespace espalier {
namespace {

// Three tokens with old - roll = 0.5, -0.5, 0; one token with 2.
std::vector<Rollout> judged_rollouts() {
  std::vector<Rollout> out = {make_rollout(3), make_rollout(1)};
  out[0].old_logprobs = {-1, -1, -1}, out[0].rollout_logprobs = {-1.5, -0.5, -1};
  out[1].old_logprobs = {-1}, out[1].rollout_logprobs = {-3};
  return out;
}

std::vector<std::vector<std::uint8_t>> masks_after(const char* words, const char* thresholds) {
  std::vector<Rollout> rollouts = judged_rollouts();
  Options options;
  options.rollout_rs = words, options.rollout_rs_threshold = thresholds;
  reject_tokens(rollouts, options);
  return {rollouts[0].loss_mask, rollouts[1].loss_mask};
}

using Masks = std::vector<std::vector<std::uint8_t>>;

TEST(Rejection, KeepsWhatEveryWordKeeps) {
  EXPECT_EQ(masks_after("", ""), (Masks{{1, 1, 1}, {1}}));
  // k1 = roll - old: -0.5, 0.5, 0 and -2, inside [log 0.7, log 1.3] = [-0.36, 0.26].
  EXPECT_EQ(masks_after("token_k1", "0.7_1.3"), (Masks{{0, 0, 1}, {0}}));
  EXPECT_EQ(masks_after("token_k1", "1.3"), (Masks{{0, 0, 1}, {0}}));  // 1/1.3 and 1.3
  EXPECT_EQ(masks_after("token_k1", "0.5_1.3"), (Masks{{1, 0, 1}, {0}}));
  EXPECT_EQ(masks_after("token_k2", "0.1"), (Masks{{0, 0, 1}, {0}}));      // 0.125, 0.125, 0 and 2
  EXPECT_EQ(masks_after("token_k3", "0.12"), (Masks{{0, 1, 1}, {0}}));     // 0.149, 0.107, 0 and 4.39
  EXPECT_EQ(masks_after("seq_sum_k1", "1.1"), (Masks{{1, 1, 1}, {0}}));    // 0 and -2
  EXPECT_EQ(masks_after("seq_mean_k2", "0.08"), (Masks{{0, 0, 0}, {0}}));  // 0.0833 and 2
  EXPECT_EQ(masks_after("seq_mean_k2", "0.09"), (Masks{{1, 1, 1}, {0}}));
  EXPECT_EQ(masks_after("seq_sum_k2", "0.24"), (Masks{{0, 0, 0}, {0}}));
  EXPECT_EQ(masks_after("seq_max_k3", "0.14"), (Masks{{0, 0, 0}, {0}}));
  EXPECT_EQ(masks_after("seq_max_k3", "5"), (Masks{{1, 1, 1}, {1}}));
  EXPECT_EQ(masks_after("token_k3, seq_sum_k1", "0.12, 1.1"), (Masks{{0, 1, 1}, {0}}));
}

TEST(Rejection, CountsATrajectoryAsOneSequence) {
  std::vector<Rollout> rollouts = judged_rollouts();
  for (Rollout& rollout : rollouts) rollout.trajectory = "\"t\"";
  Options options;
  options.rollout_rs = "seq_mean_k2", options.rollout_rs_threshold = "0.6";  // (0.25 + 2) / 4
  options.loss_unit = "trajectory";
  EXPECT_NE(reject_tokens(rollouts, options).find("0 of 4"), std::string::npos);
  options.loss_unit = "record";
  EXPECT_NE(reject_tokens(rollouts, options).find("1 of 4"), std::string::npos);
  EXPECT_EQ(rollouts[1].silence_of(0), Silenced::rejected);
}

TEST(Rejection, LeavesSequenceWeightsThatOfAllTokens) {
  std::vector<Rollout> rollouts = judged_rollouts();
  const std::vector<std::vector<double>> advantages = {{1, 1, 1}, {1}};
  Options options;
  options.rollout_rs = "token_k1", options.rollout_rs_threshold = "0.5_1.3";
  options.rollout_is = "sequence", options.rollout_is_threshold = 1e9, options.loss_agg_mode = "token-sum";
  reject_tokens(rollouts, options);
  Objective objective(rollouts, advantages, options);
  EXPECT_DOUBLE_EQ(objective.add_token(0, 0, -1, 0).logprob, -std::exp(0.5 - 0.5 + 0));  // the second token counts too
  EXPECT_EQ(objective.add_token(0, 1, -1, 0).logprob, 0);
}

TEST(Rejection, NamesWhatIsWrong) {
  const auto refuse = [](const char* words, const char* thresholds, const char* expected) {
    Options options;
    options.rollout_rs = words, options.rollout_rs_threshold = thresholds;
    try {
      rejection_rules(options);
      ADD_FAILURE() << words << " " << thresholds;
    } catch (const OptionError& error) {
      EXPECT_NE(std::string(error.what()).find(expected), std::string::npos) << error.what();
    }
  };
  refuse("seq_max_k1", "2", "seq_max_k2");
  refuse("geometric", "2", "token_k1");
  refuse("token_k2", "", "--rollout-rs-threshold");
  refuse("token_k2", "0.5_2", "one upper bound");
  refuse("token_k1", "0.5", "lower bound");
  refuse("token_k1", "2_1", "lower bound");
  refuse("token_k1", "many", "LOW_HIGH");
  refuse("token_k1", "-1_2", "above 0");
  refuse("token_k1,token_k2,token_k3", "2,2", "3 with commas");
  refuse("", "2", "--rollout-rs");
  std::vector<Rollout> rollouts = judged_rollouts();
  rollouts[1].old_logprobs.clear();
  Options options;
  options.rollout_rs = "token_k2", options.rollout_rs_threshold = "1";
  EXPECT_THROW(reject_tokens(rollouts, options), InputError);
}

}  // namespace
}  // namespace espalier
