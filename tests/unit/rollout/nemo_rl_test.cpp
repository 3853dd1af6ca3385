// Reading NeMo-RL's train_data_step*.jsonl: fields, where prompt and response part, what is refused.

#include <gtest/gtest.h>

#include "espalier/rollout/mini_batches.h"
#include "espalier/rollout/reader.h"
#include "tests/support/source_dir.h"
#include "tests/unit/rollout/expect_error.h"

namespace espalier {
namespace {

using testing::expect_error;
using Ids = std::vector<std::int32_t>;
using Mask = std::vector<std::uint8_t>;
using Numbers = std::vector<double>;

TEST(NemoRl, ReadsTheGoldenDump) {
  const RolloutFile file = read_rollouts({testing::source_dir() + "/tests/golden/train_data_step3.jsonl"});
  EXPECT_EQ(file.format, "NeMo-RL train data");
  ASSERT_EQ(file.rollouts.size(), 4u);
  const Rollout &plain = file.rollouts[0], &tool = file.rollouts[1];
  const Rollout &dropped = file.rollouts[2], &empty = file.rollouts[3];

  EXPECT_EQ(plain.prompt_ids, (Ids{11, 12, 13}));
  EXPECT_EQ(plain.response_ids, (Ids{21, 22, 2}));  // the padding is gone
  EXPECT_EQ(plain.loss_mask, (Mask{1, 1, 1}));
  EXPECT_EQ(plain.rollout_logprobs, (Numbers{-0.25, -0.5, -0.125}));  // the value at a token is that token's
  EXPECT_EQ(plain.old_logprobs, (Numbers{-0.26, -0.49, -0.12}));
  EXPECT_EQ(plain.advantages, (Numbers{0.5, 0.5, 0.5}));
  EXPECT_EQ(plain.reward, 1.0);
  EXPECT_EQ(plain.step, 3);
  EXPECT_EQ(plain.carried, R"({"content":["2+2? 4"],"idx":0})");

  EXPECT_EQ(tool.prompt_ids, plain.prompt_ids);
  EXPECT_EQ(tool.response_ids, (Ids{31, 41, 42, 21, 2}));  // tool output stays in the response, masked
  EXPECT_EQ(tool.loss_mask, (Mask{1, 0, 0, 1, 1}));
  EXPECT_EQ(tool.rollout_logprobs, (Numbers{-1, 0, 0, -2, -0.5}));

  EXPECT_EQ(dropped.prompt_ids, plain.prompt_ids);
  EXPECT_EQ(dropped.response_ids, (Ids{21, 21}));
  EXPECT_EQ(dropped.loss_mask, (Mask{0, 0}));

  EXPECT_EQ(empty.prompt_ids, (Ids{11, 12, 14, 15}));
  EXPECT_TRUE(empty.response_ids.empty());
  EXPECT_EQ(group_of(file.rollouts), (std::vector<std::int64_t>{0, 0, 0, 1}));
}

TEST(NemoRl, ReadsRowsWithoutTheListOfOne) {
  const RolloutFile file =
      parse_rollouts(R"({"token_ids":[1,2,3,0],"input_lengths":3,"token_loss_mask":[0,true,1.0,0],"rewards":0.5,)"
                     R"("prev_logprobs":[0,-1,-2,0]})",
                     "dump.jsonl");
  const Rollout& rollout = file.rollouts.at(0);
  EXPECT_EQ(rollout.prompt_ids, Ids{1});
  EXPECT_EQ(rollout.response_ids, (Ids{2, 3}));
  EXPECT_EQ(rollout.old_logprobs, (Numbers{-1, -2}));
  EXPECT_TRUE(rollout.rollout_logprobs.empty());
  EXPECT_TRUE(rollout.advantages.empty());
  EXPECT_EQ(rollout.reward, 0.5);
  EXPECT_FALSE(rollout.step.has_value());
}

// json.dumps writes these words where a step had no number.
TEST(NemoRl, ValuesOfTokensWithoutLossAreZero) {
  const std::string tokens = R"({"token_ids":[5,6,7,8],"token_loss_mask":[0,1,0,1],)";
  const RolloutFile file = parse_rollouts(
      tokens +
          R"("prev_logprobs":[0,-1,-Infinity,-2],"generation_logprobs":[NaN,-1,NaN,Infinity],"advantages":[0,1,NaN,1]})" +
          "\n" + tokens +
          R"("sample_loss_mask":0,"prev_logprobs":[NaN,NaN,NaN,NaN],"generation_logprobs":[0,NaN,NaN,-Infinity]})",
      "f");
  EXPECT_EQ(file.rollouts[0].old_logprobs, (Numbers{-1, 0, -2}));
  EXPECT_EQ(file.rollouts[0].advantages, (Numbers{1, 0, 1}));
  EXPECT_EQ(file.rollouts[0].rollout_logprobs[1], 0);
  EXPECT_EQ(file.rollouts[0].sampled_logprob(2, -7), -7);
  EXPECT_EQ(file.rollouts[1].old_logprobs, (Numbers{0, 0, 0}));
  EXPECT_EQ(file.rollouts[1].rollout_logprobs, (Numbers{0, 0, 0}));
  EXPECT_EQ(file.notes.size(), 2u);  // what the format leaves open, and one log-prob that was not recorded
}

// With dynamic sampling, `rewards` has every prompt that was sampled.
TEST(NemoRl, TheRewardOfAFilteredBatchIsTheFilteredOne) {
  const RolloutFile file = parse_rollouts(R"({"token_ids":[5,6],"token_loss_mask":[0,1],"rewards":[1.0],)"
                                          R"("filtered_rewards":[0.25],"reference_policy_logprobs":[[0,-3]]})",
                                          "f");
  EXPECT_EQ(file.rollouts[0].reward, 0.25);
  EXPECT_EQ(file.rollouts[0].ref_logprobs, (Numbers{-3}));
  EXPECT_EQ(file.rollouts[0].carried, "");
}

TEST(NemoRl, NamesFieldsThatItKeepsUnused) {
  const RolloutFile file =
      parse_rollouts(R"({"token_ids":[5,6],"token_loss_mask":[0,1],"idx":0,"sampling_mask":[1]})", "f");
  EXPECT_EQ(file.rollouts[0].carried, R"({"idx":0,"sampling_mask":[1]})");
  ASSERT_EQ(file.notes.size(), 2u);
  EXPECT_NE(file.notes[1].find("\"sampling_mask\" is kept and not used"), std::string::npos);
}

TEST(NemoRl, RefusesRowsThatDoNotFit) {
  const auto refuse = [](const std::string& fields, const std::string& where, const std::string& words) {
    SCOPED_TRACE(fields);
    expect_error<InputError>([&] { parse_rollouts("{\"token_ids\":[[5,6,7]]," + fields + "}", "f"); }, where, words);
  };
  refuse(R"("input_lengths":[4],"token_loss_mask":[[0,1,1]])", "f:1: input_lengths", "[1, 3]");
  refuse(R"("input_lengths":[0],"token_loss_mask":[[0,1,1]])", "f:1: input_lengths", "got 0");
  refuse(R"("input_lengths":[2.5],"token_loss_mask":[[0,1,1]])", "f:1: input_lengths", "got 2.5");
  refuse(R"("input_lengths":[3],"token_loss_mask":[[1,1,1]])", "f:1: token_loss_mask", "a prompt has at least one");
  refuse(R"("input_lengths":[3],"token_loss_mask":[[0,1]])", "f:1: token_loss_mask", "3 entries");
  refuse(R"("input_lengths":[3])", "f:1: token_loss_mask", "separates the response from the prompt");
  refuse(R"("input_lengths":[3],"token_loss_mask":[[0,1,1]],"advantages":[[1,2]])", "f:1: advantages", "got 2");
  refuse(R"("input_lengths":[3],"token_loss_mask":[[0,1,1],[0,1,1]])", "f:1: token_loss_mask", "one list, got several");
  refuse(R"("input_lengths":[3,3],"token_loss_mask":[[0,1,1]])", "f:1: input_lengths", "one number, got 2 numbers");
  refuse(R"("input_lengths":[3],"token_loss_mask":[[0,1,1]],"prev_logprobs":[[0,NaN,1]])", "f:1: prev_logprobs[1]",
         "finite");
  refuse(R"("input_lengths":[3],"token_loss_mask":[[0,1,1]],"sample_loss_mask":[0.5])", "f:1: sample_loss_mask",
         "0 or 1");
}

}  // namespace
}  // namespace espalier
