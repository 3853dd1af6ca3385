// `verify` of models with experts below float64: what a nearly tied router chooses by rounding does not count.
#include <ATen/core/Tensor.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>

#include "espalier/prove/verify.h"
#include "tests/equivalence/fixture.h"

namespace espalier::testing {
namespace {

namespace fs = std::filesystem;

class VerifyExperts : public ::testing::Test {
 protected:
  void SetUp() override {
    folder_ = fs::temp_directory_path() / ("espalier-experts-" + std::to_string(getpid()));
    model_ = tiny_model("qwen3-moe-near-ties", DType::float32, 5);
    write_tiny_model(*model_, folder_ / "model");
    RolloutOptions rollouts;
    rollouts.groups = 8, rollouts.group_size = {3, 4};  // of an expert that few tokens choose a floor is few draws
    rollouts.prompt_length = {8, 16}, rollouts.response_length = {4, 16};
    rollouts.nested_prompt = 0.3, rollouts.continues = 0.3, rollouts.equal_response = 0.2;
    rollouts_ = make_rollouts(rollouts, 5);
    options_ = test_options();
    options_.model = (folder_ / "model").string(), options_.rollouts = (folder_ / "rollouts.jsonl").string();
  }
  void TearDown() override { fs::remove_all(folder_); }

  Verdict verdict_in(const std::string& dtype) {
    write_jsonl(options_.rollouts, rollouts_);
    options_.dtype = dtype;
    NoProgress progress;
    return verify(options_, progress);
  }

  // Choices of a dense run: two layers run every row, the last one those that predict something.
  static std::int64_t choices_of(const Rollout& rollout) { return 2 * rollout.length() + rollout.response_length(); }
  std::int64_t all_choices() const {
    std::int64_t sum = 0;
    for (const Rollout& rollout : rollouts_) sum += choices_of(rollout);
    return sum;
  }

  fs::path folder_;
  std::unique_ptr<ModelState> model_;
  std::vector<Rollout> rollouts_;
  Options options_;
};

void expect_pass(const Verdict& verdict) {
  EXPECT_TRUE(verdict.pass()) << verdict.worst().name << " " << verdict.worst().distance.ratio() << ", log-probs "
                              << verdict.logprob.ratio() << ", loss " << verdict.loss.ratio();
}

TEST_F(VerifyExperts, ChoicesMadeByRoundingAreThoseOfFloat64) {
  for (const char* dtype : {"float32", "bfloat16"}) {
    SCOPED_TRACE(dtype);
    const Verdict verdict = verdict_in(dtype);
    expect_pass(verdict);
    ASSERT_TRUE(verdict.router.has_value());
    EXPECT_EQ(verdict.router->choices, all_choices());
    EXPECT_GT(verdict.router->differing, 0);
    // Another expert moves a log-prob by 0.1 to 10; float32 rounds logits of size 10 by 1e-6, here after three blocks.
    if (dtype == std::string("float32")) {
      EXPECT_LT(verdict.logprob.floor, 1e-3);
    }
  }
}

TEST_F(VerifyExperts, InFloat64ChoicesAreFree) {
  const Verdict verdict = verdict_in("float64");
  expect_pass(verdict);
  EXPECT_FALSE(verdict.router.has_value());
}

TEST_F(VerifyExperts, RouterLossesCountTheChoicesThatAreRepeated) {
  for (const char* scope : {"rollout", "minibatch"}) {
    SCOPED_TRACE(scope);
    options_.router_aux_loss_coef = 0.5, options_.router_z_loss_coef = 0.1, options_.router_aux_loss_scope = scope;
    const Verdict verdict = verdict_in("float32");
    expect_pass(verdict);
    std::int64_t tokens = 0;
    for (const Rollout& rollout : rollouts_) tokens += rollout.length();
    EXPECT_EQ(verdict.router->choices, 3 * tokens);  // with a router loss all rows run the last layer too
    EXPECT_GT(verdict.router->differing, 0);
  }
}

TEST_F(VerifyExperts, ACriticRepeatsItsOwnChoices) {
  options_.critic = options_.model, options_.adv_estimator = "gae";
  const Verdict verdict = verdict_in("float32");
  expect_pass(verdict);
  ASSERT_TRUE(verdict.critic && verdict.critic->router);
  EXPECT_EQ(verdict.critic->router->choices, all_choices());
  EXPECT_GT(verdict.critic->router->differing, 0);
  EXPECT_LT(verdict.critic->values.floor, 1e-3);  // as of log-probs
}

// Every second rollout records the experts that the model chooses in float32, up to its last token.
TEST_F(VerifyExperts, RecordedExpertsAreChosenAgainAndNotCounted) {
  std::int64_t free = 0;
  for (std::size_t i = 0; i < rollouts_.size(); ++i) {
    RecordedExperts& routes = rollouts_[i].recorded_experts;
    if (i % 2 == 0) {
      free += choices_of(rollouts_[i]);
      continue;
    }
    routes = routes_of(model_->shape, model_->table, on_host(model_->weights), rollouts_[i]);
    routes.ids.resize(static_cast<std::size_t>(--routes.tokens * routes.layers * routes.chosen));
    free += 2;  // of the last token, which predicts nothing and so does not run the last layer
  }
  const Verdict verdict = verdict_in("float32");
  expect_pass(verdict);
  EXPECT_EQ(verdict.router->choices, free);
  EXPECT_GT(verdict.router->differing, 0);
}

}  // namespace
}  // namespace espalier::testing
