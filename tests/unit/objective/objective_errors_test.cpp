// Every documented error of the objective: what is missing, where, and what to do.
#include <gtest/gtest.h>

#include <functional>
#include <string>
#include <vector>

#include "espalier/base/error.h"
#include "espalier/objective/objective.h"
#include "rollout_examples.h"

namespace espalier {
namespace {

// The text of the error that `body` throws as ErrorType.
template <class ErrorType>
ErrorText error_of(const std::function<void()>& body) {
  try {
    body();
  } catch (const ErrorType& error) {
    return error.text();
  }
  ADD_FAILURE() << "no error";
  return {};
}

std::vector<Rollout> two_rollouts() {
  std::vector<Rollout> rollouts = {make_rewarded(2, 1.0), make_rewarded(2, 0.0)};
  rollouts[1].where = "example.jsonl:17";
  return rollouts;
}

TEST(ObjectiveErrors, MissingRewardNamesLineOptionAndRemedy) {
  std::vector<Rollout> rollouts = two_rollouts();
  rollouts[0].advantages = {1, 1};
  for (Rollout& rollout : rollouts) rollout.reward.reset();  // beside one with a reward it would be unjudged
  const ErrorText text = error_of<InputError>([&] { compute_advantages(rollouts, Options{}); });
  EXPECT_EQ(text.where, "example.jsonl:17");
  EXPECT_NE(text.expected.find("--adv-estimator grpo"), std::string::npos) << text.expected;
  EXPECT_NE(text.remedy.find("reward"), std::string::npos) << text.remedy;
}

TEST(ObjectiveErrors, AnEmptyResponseNeedsNeither) {
  std::vector<Rollout> rollouts = {make_rewarded(1, 1.0), make_rollout(0)};
  EXPECT_EQ(compute_advantages(rollouts, Options{})[0].size(), 1u);
}

TEST(ObjectiveErrors, GivenNeedsAdvantages) {
  std::vector<Rollout> rollouts = two_rollouts();
  rollouts[0].advantages = {1, 1};
  Options options;
  options.adv_estimator = "given";
  const ErrorText text = error_of<InputError>([&] { compute_advantages(rollouts, options); });
  EXPECT_EQ(text.where, "example.jsonl:17");
  EXPECT_NE(text.expected.find("--adv-estimator given"), std::string::npos) << text.expected;
}

TEST(ObjectiveErrors, GaeNeedsValues) {
  Options options;
  options.adv_estimator = "gae";
  const ErrorText text = error_of<InputError>([&] { compute_advantages(two_rollouts(), options); });
  EXPECT_NE(text.expected.find("values"), std::string::npos) << text.expected;
}

TEST(ObjectiveErrors, KlNeedsReferenceLogProbs) {
  std::vector<Rollout> rollouts = two_rollouts();
  rollouts[0].ref_logprobs = {-1, -1};
  const std::vector<std::vector<double>> advantages(2, {1, 1});
  Options options;
  options.kl_loss_coef = 0.001;
  const ErrorText text = error_of<InputError>([&] { Objective(rollouts, advantages, options); });
  EXPECT_EQ(text.where, "example.jsonl:17");
  EXPECT_NE(text.expected.find("--kl-loss-coef 0.001"), std::string::npos) << text.expected;
}

TEST(ObjectiveErrors, RolloutWeightsNeedRolloutLogProbs) {
  const std::vector<std::vector<double>> advantages(2, {1, 1});
  const std::vector<Rollout> rollouts = two_rollouts();
  Options options;
  options.rollout_is = "token";
  const ErrorText text = error_of<InputError>([&] { Objective(rollouts, advantages, options); });
  EXPECT_EQ(text.where, "example.jsonl:1");
  EXPECT_NE(text.expected.find("--rollout-is token"), std::string::npos) << text.expected;
}

TEST(ObjectiveErrors, SapoTakesNoOtherAggregation) {
  const std::vector<std::vector<double>> advantages(2, {1, 1});
  const std::vector<Rollout> rollouts = two_rollouts();
  Options options;
  options.policy_loss = "sapo";
  options.loss_agg_mode = "token-mean";
  EXPECT_EQ(error_of<OptionError>([&] { Objective(rollouts, advantages, options); }).where, "--loss-agg-mode");
}

TEST(ObjectiveErrors, AWordThatIsNoneOfAnOptionsIsRefusedWhereItIsSaid) {
  for (const std::string name : {"policy-loss", "loss-agg-mode", "kl-loss-type", "rollout-is", "adv-estimator"}) {
    Options options;
    EXPECT_EQ(error_of<OptionError>([&] { set_option(options, name, "nonsense"); }).where, "--" + name);
  }
}

TEST(ObjectiveErrors, TokenByTokenUseOfASequenceLossIsADefect) {
  const std::vector<std::vector<double>> advantages(2, {1, 1});
  const std::vector<Rollout> rollouts = two_rollouts();
  Options options;
  options.policy_loss = "gspo";
  Objective objective(rollouts, advantages, options);
  EXPECT_TRUE(objective.needs_whole_rollout());
  EXPECT_THROW(objective.add_token(0, 0, -1, 0), InternalError);
}

}  // namespace
}  // namespace espalier
