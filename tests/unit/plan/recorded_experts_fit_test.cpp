// Recorded experts against a model: what fits, what is dropped, what is refused.
#include "espalier/plan/recorded_experts_fit.h"

#include <gtest/gtest.h>

#include "espalier/base/error.h"
#include "tests/unit/plan/shapes.h"

namespace espalier {
namespace {

// Three layers, the second without experts; two of five experts a token.
ModelShape shape() {
  ModelShape shape = testing::tiny_shape();
  shape.experts = 5, shape.experts_per_token = 2, shape.expert_inner = 32;
  shape.layer[0].mlp = shape.layer[2].mlp = MlpKind::experts;
  return shape;
}

std::vector<Rollout> rollouts(std::int32_t layers, std::int32_t chosen, std::vector<std::uint16_t> ids) {
  std::vector<Rollout> out = testing::group_of(2, 1, 1);
  out[0].where = "f:1";
  out[0].recorded_experts = {static_cast<std::int32_t>(ids.size()) / (layers * chosen), layers, chosen, std::move(ids)};
  return out;
}

void expect_refused(std::vector<Rollout> given, const ModelShape& model, const std::string& words) {
  try {
    fit_recorded_experts(given, model);
    ADD_FAILURE() << "nothing was thrown; expected " << words;
  } catch (const InputError& error) {
    EXPECT_NE(std::string(error.what()).find("f:1: routed_experts"), std::string::npos) << error.what();
    EXPECT_NE(std::string(error.what()).find(words), std::string::npos) << error.what();
  }
}

TEST(RouteFit, KeepsTheLayersWithExperts) {
  const std::vector<std::uint16_t> kept = {0, 1, 3, 4, 1, 2, 0, 4};
  auto all = rollouts(3, 2, {0, 1, 0, 0, 3, 4, 1, 2, 9, 9, 0, 4}), some = rollouts(2, 2, kept);
  fit_recorded_experts(all, shape());
  fit_recorded_experts(some, shape());
  EXPECT_EQ(all[0].recorded_experts.ids, kept);
  EXPECT_EQ(all[0].recorded_experts.layers, 2);
  EXPECT_EQ(some[0].recorded_experts.ids, kept);
  EXPECT_EQ(all[0].recorded_experts.tokens, 2);
}

TEST(RouteFit, SortsTheExpertsOfEveryTokenAndLayer) {
  auto given = rollouts(2, 2, {1, 0, 3, 4, 2, 1, 4, 0});
  fit_recorded_experts(given, shape());
  EXPECT_EQ(given[0].recorded_experts.ids, (std::vector<std::uint16_t>{0, 1, 3, 4, 1, 2, 0, 4}));
}

TEST(RouteFit, RefusesTheRecordsOfAnotherModel) {
  expect_refused(rollouts(4, 2, std::vector<std::uint16_t>(8)), shape(),
                 "2 layers per token (those with experts) or 3");
  expect_refused(rollouts(2, 3, std::vector<std::uint16_t>(6)), shape(), "2 experts per token");
  expect_refused(rollouts(2, 2, {0, 1, 2, 5}), shape(), "experts in [0, 5)");
  expect_refused(rollouts(2, 2, {0, 1, 2, 2}), shape(), "2 twice");
  expect_refused(rollouts(2, 2, {0, 1, 2, 3}), testing::tiny_shape(), "because the model has none");
  expect_refused(rollouts(2, 2, {0, 1, 2, 3}), testing::qwen3_30b_a3b(), "48 layers per token");
}

TEST(RouteFit, TheNoteCountsPromptTokensThatAreNoLongerShared) {
  std::vector<Rollout> batch = testing::group_of(6, 2, 3);
  EXPECT_EQ(recorded_experts_note(batch), "");
  for (Rollout& rollout : batch) rollout.recorded_experts = {7, 1, 1, {0, 1, 2, 3, 4, 5, 0}};
  EXPECT_EQ(recorded_experts_note(batch), "routed_experts of 3 of 3 rollouts are chosen again");
  batch[1].recorded_experts.ids[4] = 0;  // two of its six prompt tokens are its own now
  EXPECT_NE(recorded_experts_note(batch).find("on 2 prompt tokens"), std::string::npos) << recorded_experts_note(batch);
  batch[2].recorded_experts = {};  // and all six of this one
  EXPECT_NE(recorded_experts_note(batch).find("of 2 of 3 rollouts"), std::string::npos) << recorded_experts_note(batch);
  EXPECT_NE(recorded_experts_note(batch).find("on 8 prompt tokens"), std::string::npos) << recorded_experts_note(batch);
}

}  // namespace
}  // namespace espalier
