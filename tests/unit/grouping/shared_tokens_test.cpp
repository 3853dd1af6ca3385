// Tokens that branches of a trajectory have in common: who trains them.
#include "espalier/grouping/shared_tokens.h"

#include <gtest/gtest.h>

#include "espalier/rollout/reader.h"

namespace espalier {
namespace {

// A stem of two tokens in two branches, a third branch that leaves it after one, and an independent rollout.
std::vector<Rollout> branches() {
  return parse_rollouts(R"({"trajectory":"x","branch":"a","prompt_ids":[1],"response_ids":[5,6,7]}
{"trajectory":"x","branch":"b","prompt_ids":[1],"response_ids":[5,6,8],"advantage":[1,1,1]}
{"trajectory":"x","branch":"c","prompt_ids":[1],"response_ids":[5,9]}
{"trajectory":"y","prompt_ids":[1],"response_ids":[5,6,7]}
)",
                        "f")
      .rollouts;
}

using Mask = std::vector<std::uint8_t>;

TEST(SharedTokens, TrainOnceOnTheFirstBranch) {
  std::vector<Rollout> rollouts = branches();
  const std::vector<std::string> notes = settle_shared_tokens(rollouts, SharedTokens::once);
  EXPECT_EQ(rollouts[0].loss_mask, (Mask{1, 1, 1}));
  EXPECT_EQ(rollouts[1].loss_mask, (Mask{0, 0, 1}));
  EXPECT_EQ(rollouts[2].loss_mask, (Mask{0, 1}));
  EXPECT_EQ(rollouts[3].loss_mask, (Mask{1, 1, 1}));  // sampled apart
  EXPECT_EQ(rollouts[1].silence_of(0), Silenced::shared);
  ASSERT_EQ(notes.size(), 2u);
  EXPECT_EQ(notes[0].substr(0, 30), "2 sampled tokens are common to") << notes[0];
  EXPECT_EQ(notes[1].substr(0, 9), "2 of them") << notes[1];  // b has a recorded advantage
  settle_shared_tokens(rollouts, SharedTokens::once);
  EXPECT_EQ(rollouts[1].loss_mask, (Mask{0, 0, 1}));
}

TEST(SharedTokens, AverageIsTheMeanOverBranches) {
  std::vector<Rollout> rollouts = branches();
  settle_shared_tokens(rollouts, SharedTokens::average);
  const double third = 1.0 / 3;
  EXPECT_EQ(rollouts[0].loss_shares, (std::vector<double>{third, third, third}));
  EXPECT_EQ(rollouts[2].loss_shares, (std::vector<double>{third, third}));
  EXPECT_TRUE(rollouts[3].loss_shares.empty());
  EXPECT_DOUBLE_EQ(rollouts[0].loss_tokens() + rollouts[1].loss_tokens() + rollouts[2].loss_tokens(), 8.0 / 3);
}

TEST(SharedTokens, AStemWithoutBranchLiesOnAllAndAPromptMayRepeatIt) {
  std::vector<Rollout> rollouts = parse_rollouts(R"({"trajectory":1,"turn":0,"prompt_ids":[1],"response_ids":[5,6]}
{"trajectory":1,"turn":1,"branch":"a","prompt_ids":[1,5,6],"response_ids":[7]}
{"trajectory":1,"turn":1,"branch":"b","prompt_ids":[1,5],"response_ids":[6,8]}
)",
                                                 "f")
                                      .rollouts;
  settle_shared_tokens(rollouts, SharedTokens::average);
  EXPECT_EQ(rollouts[0].loss_shares, (std::vector<double>{1, 0.5}));  // the second also stands in b's response
  EXPECT_EQ(rollouts[1].loss_shares, (std::vector<double>{0.5}));
  EXPECT_EQ(rollouts[2].loss_shares, (std::vector<double>{0.5, 0.5}));
}

TEST(SharedTokens, OneBranchAndNoBranchChangeNothing) {
  for (const SharedTokens choice : {SharedTokens::once, SharedTokens::average, SharedTokens::each}) {
    std::vector<Rollout> rollouts = branches();
    for (Rollout& rollout : rollouts) rollout.branch = rollout.trajectory == "\"x\"" ? "\"a\"" : "";
    const std::vector<std::string> notes = settle_shared_tokens(rollouts, choice);
    ASSERT_EQ(notes.size(), 1u);
    EXPECT_EQ(notes[0].substr(0, 32), "3 sampled tokens with loss are r") << notes[0];  // 5 6 in b, 5 in c
    EXPECT_EQ(rollouts[1].loss_mask, (Mask{1, 1, 1}));
    EXPECT_TRUE(rollouts[1].loss_shares.empty());
  }
  std::vector<Rollout> rollouts = branches();
  EXPECT_EQ(settle_shared_tokens(rollouts, SharedTokens::each).size(), 1u);
  EXPECT_EQ(rollouts[1].loss_mask, (Mask{1, 1, 1}));
}

}  // namespace
}  // namespace espalier
