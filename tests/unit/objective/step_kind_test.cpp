// The kind of step that a batch asks for: the planner and the objective must agree on it.
#include "espalier/program/step_kind.h"

#include <gtest/gtest.h>

#include "espalier/objective/objective.h"

namespace espalier {
namespace {

std::vector<Rollout> two_rollouts(bool old_logprobs) {
  std::vector<Rollout> rollouts(2);
  for (Rollout& rollout : rollouts) {
    rollout.prompt_ids = {1, 2};
    rollout.response_ids = {3, 4};
    rollout.loss_mask = {1, 1};
    rollout.rollout_logprobs = {-1, -2};
  }
  if (old_logprobs) rollouts[0].old_logprobs = rollouts[1].old_logprobs = {-1, -2};
  return rollouts;
}

TEST(StepKind, SaysOfEveryLossWhatTheObjectiveSays) {
  const ModelShape shape;
  const std::vector<std::vector<double>> advantages(2, {1, 1});
  for (const char* loss : words_of(PolicyLoss{}))
    for (const char* correction : words_of(RolloutCorrection{}))
      for (const bool old : {false, true}) {
        Options options;
        options.policy_loss = loss, options.rollout_is = correction;
        const std::vector<Rollout> rollouts = two_rollouts(old);
        const Objective objective(rollouts, advantages, options);
        EXPECT_EQ(step_kind_of(options, shape, rollouts).whole_rollout, objective.needs_whole_rollout())
            << loss << " " << correction << " " << old;
      }
}

TEST(StepKind, SequenceWeightsNeedTheWholeRolloutWhereOldLogprobsAreMissing) {
  Options options;
  options.rollout_is = RolloutCorrection::sequence;
  std::vector<Rollout> rollouts = two_rollouts(true);
  EXPECT_FALSE(step_kind_of(options, {}, rollouts).whole_rollout);
  rollouts[1].old_logprobs.clear();
  EXPECT_TRUE(step_kind_of(options, {}, rollouts).whole_rollout);
  ModelShape critic;
  critic.value_head = true;
  EXPECT_FALSE(step_kind_of(options, critic, rollouts).whole_rollout);
}

// A ratio over several records is known after a forward pass; each token then stands by itself.
TEST(StepKind, SequencesOfSeveralRecordsAskForAForwardPass) {
  const std::vector<std::vector<double>> advantages(2, {1, 1});
  std::vector<Rollout> rollouts = two_rollouts(true);
  for (Rollout& rollout : rollouts) rollout.trajectory = "\"t\"";
  for (const char* loss : {"gspo", "vanilla"})
    for (const char* unit : words_of(LossUnit{})) {
      Options options;
      options.policy_loss = loss, options.loss_unit = unit;
      const bool expected = std::string(loss) == "gspo" && std::string(unit) == "trajectory";
      const StepKind kind = step_kind_of(options, {}, rollouts);
      const Objective objective(rollouts, advantages, options);
      EXPECT_EQ(kind.sequence_pass, expected) << loss << " " << unit;
      EXPECT_EQ(objective.needs_sequences(), expected) << loss << " " << unit;
      EXPECT_EQ(kind.whole_rollout, objective.needs_whole_rollout()) << loss << " " << unit;
      EXPECT_EQ(kind.whole_rollout, !expected && std::string(loss) == "gspo") << loss << " " << unit;
    }
  Options options;
  options.policy_loss = "gspo", options.loss_unit = "trajectory";
  rollouts[1].loss_mask = {0, 0};  // one record with loss is a sequence by itself
  EXPECT_FALSE(step_kind_of(options, {}, rollouts).sequence_pass);
}

TEST(StepKind, RouterLossesAskForAllRowsAndACountingPass) {
  ModelShape moe;
  moe.experts = 4, moe.experts_per_token = 2;
  Options options;
  EXPECT_FALSE(step_kind_of(options, moe, {}).all_rows_choose);
  options.router_z_loss_coef = 0.1;
  EXPECT_TRUE(step_kind_of(options, moe, {}).all_rows_choose);
  EXPECT_FALSE(step_kind_of(options, moe, {}).counting_pass);
  options.router_aux_loss_coef = 0.1, options.router_aux_loss_scope = AuxScope::minibatch;
  EXPECT_TRUE(step_kind_of(options, moe, {}).counting_pass);
  EXPECT_FALSE(step_kind_of(options, moe, {}, true).counting_pass);
  EXPECT_FALSE(step_kind_of(options, {}, {}).all_rows_choose);  // a dense model
}

}  // namespace
}  // namespace espalier
