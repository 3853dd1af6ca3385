// One pass over a batch, with gradients and without, and the update behind it.
#include "espalier/step/pass.h"

#include <ATen/core/Tensor.h>
#include <gtest/gtest.h>

#include <cmath>

#include "espalier/base/error.h"
#include "espalier/forecast/cost_model.h"
#include "tests/unit/execute/small_step.h"

namespace espalier::testing {
namespace {

using at::Tensor;

class PassTest : public ::testing::Test {
 protected:
  PassTest()
      : rollouts_(make_rollouts(case_.rollouts, case_.seed)),
        model_(tiny_model(case_.family, DType::float64, case_.seed)),
        workspace_(std::int64_t{1} << 28) {
    case_.options.dtype = "float64";
    case_.options.lr = 0.01, case_.options.weight_decay = 0, case_.options.max_grad_norm = 0;
    model_->decoder.reserve_positions(longest_of(rollouts_));
    optimizer_ = std::make_unique<AdamW>(model_->table, model_->weights, AdamWSettings::from(case_.options));
  }
  Learner learner(AdamW* optimizer) {
    return {*model_, case_.options, default_profile("cpu", DType::float64, 1), workspace_, optimizer};
  }
  PassReport run(Learner& learner, Head& head) {
    Timer timer;
    return run_gradient_pass(learner, rollouts_, head, nullptr, false, timer);
  }

  Case case_ = nested_trunks();
  std::vector<Rollout> rollouts_;
  std::unique_ptr<ModelState> model_;
  Workspace workspace_;
  std::unique_ptr<AdamW> optimizer_;
};

TEST_F(PassTest, OverwritesTheGradientsAndReportsWhatItRan) {
  Learner learner = this->learner(nullptr);
  PlainHead head, again;
  std::vector<double> shares;
  learner.on_share = [&](double share) { shares.push_back(share); };
  const PassReport report = run(learner, head);
  const Tensor gradient = learner.gradients.flat().clone();
  EXPECT_GT(gradient.norm().item<double>(), 0);
  EXPECT_EQ(report.trunk_rows + report.wave_rows, report.plan.physical_rows());
  EXPECT_EQ(report.trunk_forwards, report.plan.trunks);
  EXPECT_LT(report.plan.physical_rows(), report.plan.logical_rows) << "prompts are shared";
  EXPECT_TRUE(std::ranges::is_sorted(shares));
  EXPECT_EQ(shares.back(), 1);
  EXPECT_LE(report.seconds.plan, report.seconds.total);
  EXPECT_FALSE(report.profile);
  EXPECT_EQ(workspace_.arena.in_use(), 0);
  learner.gradients.views().final_norm_M.fill_(1e6);
  run(learner, again);
  EXPECT_EQ(again.loss, head.loss);
  EXPECT_TRUE(learner.gradients.flat().equal(gradient)) << "the second pass has the first one's gradient alone";
}

TEST_F(PassTest, HasTheGradientOfTheDensePass) {
  Learner shared = learner(nullptr);
  PlainHead head, dense_head;
  run(shared, head);
  case_.options.schedule = "dense";
  Learner dense = learner(nullptr);
  const PassReport report = run(dense, dense_head);
  EXPECT_EQ(report.plan.physical_rows(), report.plan.logical_rows);
  const Worst worst = worst_parameter(case_, shared.gradients.flat(), dense.gradients.flat());
  EXPECT_LE(worst.error, kFloat64) << worst.parameter;
}

TEST_F(PassTest, AnErrorGivesTheArenaBack) {
  Learner learner = this->learner(nullptr);
  PlainHead failing;
  failing.fails_at = 2;
  EXPECT_THROW(run(learner, failing), std::runtime_error);
  EXPECT_EQ(workspace_.arena.in_use(), 0);
}

TEST_F(PassTest, WithAProfileSecondsAddUpToTheStep) {
  case_.options.profile = true;
  Learner learner = this->learner(&*optimizer_);
  PlainHead head;
  PassReport report = run(learner, head);
  ASSERT_TRUE(report.profile);
  const std::size_t parts = report.profile->seconds.size();
  const double before = report.seconds.total;
  report.add_update({.seconds = 0.25});
  EXPECT_EQ(report.seconds.optimizer, 0.25);
  EXPECT_DOUBLE_EQ(report.seconds.total, before + 0.25);
  ASSERT_EQ(report.profile->seconds.size(), parts + 1);
  EXPECT_EQ(report.profile->seconds[parts - 1].first, std::string(part::kOptimizer));
  double sum = 0;
  for (const auto& [part, seconds] : report.profile->seconds) sum += seconds;
  EXPECT_NEAR(sum, report.seconds.total, 1e-9);
}

// The first step of Adam moves every weight by lr g / (|g| + eps).
TEST_F(PassTest, AnUpdateMovesTheWeightsByTheGradient) {
  Learner learner = this->learner(&*optimizer_);
  PlainHead head;
  run(learner, head);
  const Tensor before = model_->weights.clone(), gradient = learner.gradients.flat();
  const std::int64_t updates = model_->updates;
  const AdamW::Update update = update_weights(learner);
  EXPECT_EQ(model_->updates, updates + 1);
  EXPECT_NEAR(update.grad_norm, gradient.norm().item<double>(), 1e-12 * update.grad_norm);
  const Tensor expected = before - 0.01 * gradient / (gradient.abs() + 1e-8);
  EXPECT_LE((model_->weights - expected).abs().max().item<double>(), 1e-12);
  Learner without = this->learner(nullptr);
  EXPECT_THROW(update_weights(without), InternalError);
}

TEST_F(PassTest, ALearnerHoldsItsWeightsGradientsAndState) {
  Learner with = learner(&*optimizer_), without = learner(nullptr);
  const auto bytes = static_cast<std::int64_t>(model_->weights.nbytes());
  EXPECT_EQ(without.held_bytes(), 2 * bytes) << "weights and gradients";
  EXPECT_EQ(with.held_bytes(), 4 * bytes) << "and both moments: in float64 the masters are the weights";
  EXPECT_EQ(workspace_.held_bytes(), 6 * bytes);
}

TEST_F(PassTest, AForwardPassScoresMaskedTokensTooAndLeavesGradientsAlone) {
  for (Rollout& rollout : rollouts_)
    if (!rollout.loss_mask.empty()) rollout.loss_mask.front() = 0;
  Learner learner = this->learner(nullptr);
  learner.gradients.zero();
  class Bar final : public Progress {
   public:
    void begin(std::string_view task, std::int64_t total, std::string_view) override { name = task, rows = total; }
    void advance_to(std::int64_t at) override { done = at; }
    void end() override {}
    void note(std::string_view) override {}
    std::string name;
    std::int64_t rows = 0, done = 0;
  } bar;
  PlainHead head;
  const MachineProfile machine = default_profile("cpu", DType::float64, 1);
  const ForwardReport report =
      run_forward_pass({model_->decoder, rollouts_, case_.options, machine, workspace_, bar, "scoring"}, head);
  std::size_t tokens = 0;
  std::int64_t logical = 0;
  for (const Rollout& rollout : rollouts_) tokens += rollout.response_ids.size(), logical += rollout.length();
  EXPECT_EQ(head.times_scored.size(), tokens);
  EXPECT_EQ(bar.name, "scoring");
  EXPECT_EQ(bar.done, bar.rows);
  EXPECT_EQ(report.physical_rows, bar.rows);
  EXPECT_GT(report.logical_rows, report.physical_rows);
  EXPECT_LE(report.logical_rows, logical);
  EXPECT_EQ(learner.gradients.flat().abs().max().item<double>(), 0);
  EXPECT_EQ(workspace_.arena.in_use(), 0);
}

}  // namespace
}  // namespace espalier::testing
