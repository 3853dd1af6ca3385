// Router losses and loads: every plan and both scopes agree with a dense autograd run, a shared token counted once
// for each rollout that has it.
#include <ATen/core/Tensor.h>
#include <ATen/ops/dot.h>
#include <ATen/ops/zeros_like.h>
#include <gtest/gtest.h>

#include <cmath>
#include <numeric>

#include "espalier/base/error.h"
#include "espalier/data/training_data.h"
#include "espalier/metrics/progress.h"
#include "espalier/ops/dispatch.h"
#include "espalier/score/score.h"
#include "tests/device/guarded_device.h"
#include "tests/equivalence/fixture.h"

namespace espalier::testing {
namespace {

RolloutOptions ragged_with_routers() {
  RolloutOptions options = ragged_rollouts();
  options.empty_response = 0.2, options.continues = 0.3;
  options.temperature_low = 0.7, options.temperature_high = 1.3;
  return options;
}

Case router_case(const std::string& family, const std::string& scope, double aux, double z) {
  Case c;
  c.family = family;
  c.rollouts = ragged_with_routers();
  c.options.router_aux_loss_coef = aux;
  c.options.router_aux_loss_scope = scope;
  c.options.router_z_loss_coef = z;
  return c;
}

void expect_near(double value, double expected) {
  EXPECT_NEAR(value, expected, kFloat64 * std::max(1.0, std::abs(expected)));
}

void expect_equal(const Case& c, const Outcome& run, const OracleResult& expected) {
  const Worst worst = worst_parameter(c, run.gradient, expected.gradient);
  EXPECT_LE(worst.error, kFloat64) << worst.parameter;
  expect_near(run.loss, expected.loss);
  expect_near(run.report.router.aux_loss, expected.aux_loss);
  expect_near(run.report.router.z_loss, expected.z_loss);
  EXPECT_EQ(run.report.router.load, expected.load);
}

struct RouterLoss {
  const char* family;
  const char* scope;
  double aux, z;
};

class RouterLosses : public ::testing::TestWithParam<RouterLoss> {};

TEST_P(RouterLosses, EveryPlanEqualsAutograd) {
  const RouterLoss& loss = GetParam();
  Case c = router_case(loss.family, loss.scope, loss.aux, loss.z);
  for (c.seed = 41; c.seed <= 43; ++c.seed) {
    const OracleResult expected = run_oracle(c);
    for (const Plan& plan : all_plans({0, 1, 2, 7, 20})) {
      SCOPED_TRACE(plan.name + ", " + c.family + ", scope " + loss.scope + ", seed " + std::to_string(c.seed));
      const Outcome run = run_case(with(c, plan));
      expect_equal(c, run, expected);
      EXPECT_EQ(run.report.router.counts,
                loss.scope == std::string("minibatch") && loss.aux != 0 ? "counting pass" : "update pass");
    }
  }
}
INSTANTIATE_TEST_SUITE_P(Scopes, RouterLosses,
                         ::testing::Values(RouterLoss{"qwen3-moe", "rollout", 0.5, 0},
                                           RouterLoss{"qwen3-moe", "minibatch", 0.5, 0},
                                           RouterLoss{"qwen3-moe", "rollout", 0, 0.3},
                                           RouterLoss{"qwen3-moe", "minibatch", 0, 0.3},
                                           RouterLoss{"qwen3-moe-plain", "rollout", 0.7, 0.2},
                                           RouterLoss{"qwen3-moe-plain", "minibatch", 0.7, 0.2},
                                           RouterLoss{"qwen3-moe-sparse", "rollout", 0.5, 0.1},
                                           RouterLoss{"qwen3-moe-sparse", "minibatch", 0.5, 0.1},
                                           RouterLoss{"qwen3-moe-one", "minibatch", 0.5, 0.1},
                                           RouterLoss{"qwen3-moe-many", "rollout", 0.5, 0.1},
                                           RouterLoss{"qwen3-moe-ties", "rollout", 0.5, 0.1}));

// One prompt, n responses, by share mode: what is counted is what was said, not what was run.
TEST(Routers, LoadsCountLogicalTokensWhateverIsShared) {
  Case c = router_case("qwen3-moe", "rollout", 0.01, 0);
  c.rollouts = {};
  c.rollouts.groups = 1, c.rollouts.group_size = {6, 6};
  c.rollouts.prompt_length = {20, 20}, c.rollouts.response_length = {5, 5};
  for (const Plan& plan : all_plans({0, 9})) {
    const Outcome run = run_case(with(c, plan));
    for (const auto& load : run.report.router.load)
      EXPECT_EQ(std::accumulate(load.begin(), load.end(), std::int64_t{0}), 2 * 6 * 25) << plan.name;
  }
}

TEST(Routers, AnExpertNobodyChoseHasNoGradient) {
  Case c = router_case("qwen3-moe-ties", "rollout", 0, 0);
  const Outcome run = run_case(c);
  const ParameterTable table(tiny_shape(c.family));
  for (const Parameter& p : table.parameters()) {
    if (p.name.find(".experts.") == std::string::npos) continue;
    const bool chosen =
        p.name.find(".experts.0.") != std::string::npos || p.name.find(".experts.1.") != std::string::npos;
    EXPECT_EQ(run.gradient.narrow(0, p.offset, p.count).abs().sum().item<double>() != 0, chosen) << p.name;
  }
}

// A shared trunk routes its rows once: the rows that ran, not the logical ones.
TEST(Routers, SharedRowsRunOnceWithRouterLosses) {
  Case c = router_case("qwen3-moe", "minibatch", 0.1, 0.1);
  c.rollouts = {};
  c.rollouts.groups = 1, c.rollouts.group_size = {8, 8};
  c.rollouts.prompt_length = {30, 30}, c.rollouts.response_length = {6, 6};
  c.options.schedule = "phased", c.options.token_budget = 31, c.options.share = "prompt";
  const Outcome run = run_case(c);
  EXPECT_EQ(run.report.trunk_rows, 29);
  EXPECT_EQ(run.report.wave_rows, 8 * 6 + run.report.plan.waves);
}

// Rollouts of several temperatures in waves of few rows: a narrow last layer has more output rows than there are rows.
TEST(Routers, MoreOutputRowsThanRowsAreRouted) {
  Case c = router_case("qwen3-moe", "rollout", 0, 0);
  c.options.schedule = "phased", c.options.token_budget = 9;
  const Outcome run = run_case(c);
  const OracleResult expected = run_oracle(c);
  const Worst worst = worst_parameter(c, run.gradient, expected.gradient);
  EXPECT_LE(worst.error, kFloat64) << worst.parameter;
  expect_near(run.loss, expected.loss);
}

// Against the same plan with nothing but loads, whose choices come back once an item.
TEST(Routers, LossValuesComeBackOnceAStep) {
  if (&bound_device() != &guarded_device()) GTEST_SKIP() << "copies are counted on the guarded device";
  const auto copies = [](double aux, double z) {
    Case c = router_case("qwen3-moe", "rollout", aux, z);
    c.options.schedule = "phased", c.options.token_budget = 9;
    const std::int64_t before = guarded_device().copies_back();
    const Outcome run = run_case(c);
    EXPECT_GT(run.report.plan.waves, 3);
    return guarded_device().copies_back() - before;
  };
  EXPECT_EQ(copies(0.1, 0.1), copies(0, 0) + 1);
}

TEST(Routers, ScopesDiffer) {
  const Case one = router_case("qwen3-moe", "rollout", 0.5, 0), all = router_case("qwen3-moe", "minibatch", 0.5, 0);
  EXPECT_GT(std::abs(run_oracle(one).aux_loss - run_oracle(all).aux_loss), 1e-3);
  const Case square_of_one = router_case("qwen3-moe", "rollout", 0, 0.5),
             square_of_all = router_case("qwen3-moe", "minibatch", 0, 0.5);
  EXPECT_GT(std::abs(run_oracle(square_of_one).z_loss - run_oracle(square_of_all).z_loss), 1e-3);
}

TEST(Routers, TheirLossesAreRefusedForDenseModels) {
  EXPECT_THROW(run_case(router_case("qwen3", "rollout", 0.1, 0)), OptionError);
  EXPECT_THROW(run_case(router_case("qwen3", "rollout", 0, 0.1)), OptionError);
}

// The router losses of the oracle against central differences of its loss. f has no gradient, so the auxiliary loss's
// slope is its own only where a small step changes no choice: the step is far below the distance to the next tie.
TEST(Routers, OracleGradientIsTheSlopeOfItsLoss) {
  for (const char* scope : {"rollout", "minibatch"}) {
    const Case c = router_case("qwen3-moe-plain", scope, 0.5, 0.2);
    const auto model = tiny_model(c.family, DType::float64, 5);
    const TrainingData data(make_rollouts(c.rollouts, 5), c.options);
    const MiniBatch batch = data.mini_batch(0);
    const auto run = [&](const at::Tensor& weights) {
      return oracle(model->shape, model->table, weights, batch.rollouts, batch.advantages, c.options);
    };
    const at::Tensor weights_at = on_host(model->weights);
    const at::Tensor gradient = run(weights_at).gradient;
    at::Tensor direction = at::zeros_like(weights_at);
    for (const Parameter& p : model->table.parameters())
      if (p.name.ends_with("mlp.gate.weight") || p.name.ends_with("q_proj.weight"))
        direction.narrow(0, p.offset, p.count).fill_(1).cos_().narrow(0, 0, p.count / 2).neg_();
    direction /= direction.norm();
    constexpr double kStep = 1e-6;  // errs by 1e-16 f / h = 1e-10 times the loss, and a term in h^2
    const double slope =
        (run(weights_at + kStep * direction).loss - run(weights_at - kStep * direction).loss) / (2 * kStep);
    EXPECT_NEAR(at::dot(gradient, direction).item<double>(), slope, 1e-7) << scope;
  }
}

// As Float32.EveryPlanIsAsExactAsDense; with four choices in float32 a tie closer than rounding has a chance of about
// 1e-6 a token.
TEST(Routers, Float32IsAsExactAsDense) {
  Case c = router_case("qwen3-moe", "rollout", 0.5, 0.1);
  for (c.seed = 51; c.seed <= 53; ++c.seed) {
    const at::Tensor truth = run_oracle(c).gradient;
    const at::Tensor dense = run_case(with(c, {"dense", "dense", 0, "auto"}), DType::float32).gradient;
    const double floor = (dense - truth).norm().item<double>();
    for (const Plan& plan : all_plans({0, 7})) {
      const at::Tensor gradient = run_case(with(c, plan), DType::float32).gradient;
      EXPECT_LE((gradient - truth).norm().item<double>(), 2 * floor) << plan.name << ", seed " << c.seed;
    }
  }
}

TEST(Routers, Bfloat16IsAsExactAsDense) {
  for (const char* scope : {"rollout", "minibatch"}) {
    Case c = router_case("qwen3-moe", scope, 0.5, 0.1);
    c.rollouts.policy = PolicyAge::none;  // ratios of 1: clipping cannot flip on rounded log-probs
    for (c.seed = 54; c.seed <= 56; ++c.seed) {
      const at::Tensor truth = run_oracle(c).gradient;
      const at::Tensor dense = run_case(with(c, {"", "dense", 0, "auto"}), DType::bfloat16).gradient;
      const double floor = (dense - truth).norm().item<double>();
      for (const char* state : {"keep", "recompute"}) {
        const at::Tensor phased = run_case(with(c, {"", "phased", 9, state}), DType::bfloat16).gradient;
        EXPECT_LE((phased - truth).norm().item<double>(), 2 * floor) << scope << ", " << state << ", seed " << c.seed;
      }
    }
  }
}

// Without a loss the last layer runs only rows that predict something, and is not counted unless it is dense.
TEST(Routers, LoadsAreReportedWithoutALoss) {
  for (const char* family : {"qwen3-moe", "qwen3-moe-sparse", "qwen3-moe-late"}) {
    const OracleResult expected = run_oracle(router_case(family, "rollout", 1e-3, 0));
    for (const Plan& plan : all_plans({0, 7})) {
      SCOPED_TRACE(text_of(family, ", ", plan.name));
      const RouterReport router = run_case(with(router_case(family, "rollout", 0, 0), plan)).report.router;
      ASSERT_EQ(router.load.size(), 3u);
      EXPECT_EQ(router.load[0], expected.load[0]);
      EXPECT_EQ(router.load[1], expected.load[1]);
      EXPECT_TRUE(router.load[2].empty());
      EXPECT_EQ(router.counts, "update pass");
      EXPECT_EQ(router.weighted_loss, 0);
    }
  }
  EXPECT_TRUE(run_case(router_case("qwen3", "rollout", 0, 0)).report.router.load.empty());
}

TEST(Routers, CountsOfAScorePassStandInForACountingPass) {
  Case c = router_case("qwen3-moe", "minibatch", 0.5, 0.1);
  c.options.mini_batch_size = 4, c.options.dtype = "float64", c.options.schedule = "phased";
  const auto model = tiny_model(c.family, DType::float64, c.seed);
  const std::vector<Rollout> rollouts = make_rollouts(c.rollouts, c.seed);
  const TrainingData data(rollouts, c.options);
  ASSERT_GE(data.mini_batches(), 2);
  model->decoder.reserve_positions(data.longest());
  const MachineProfile machine = default_profile("cpu", DType::float64, 2);
  Actor actor(*model, c.options, machine);
  NoProgress progress;
  ScoredChoices scored(*model, rollouts), few(*model, std::span(rollouts).first(1));
  score_rollouts(model->decoder, rollouts, c.options, machine, actor.workspace, progress, &scored.counts);
  for (std::int64_t b = 0; b < data.mini_batches(); ++b) {
    actor.scored = nullptr;
    const GradientReport counted = compute_gradient(actor, data.mini_batch(b), false);
    const at::Tensor gradient = on_host(actor.gradients.flat()).clone();
    actor.scored = &scored;
    const GradientReport taken = compute_gradient(actor, data.mini_batch(b), false);
    EXPECT_EQ(counted.router.counts, "counting pass");
    EXPECT_EQ(taken.router.counts, "score pass");
    EXPECT_EQ(taken.router.load, counted.router.load);
    EXPECT_TRUE(on_host(actor.gradients.flat()).equal(gradient));
    EXPECT_LT(taken.plan.chosen.flops, counted.plan.chosen.flops);
  }
  actor.scored = &few;  // not all of the mini-batch
  EXPECT_EQ(compute_gradient(actor, data.mini_batch(0), false).router.counts, "counting pass");
  actor.scored = &scored;
  ++model->updates;  // other weights
  EXPECT_EQ(compute_gradient(actor, data.mini_batch(0), false).router.counts, "counting pass");
}

TEST(Routers, TheCountingPassIsAPartOfTheProfile) {
  Case c = router_case("qwen3-moe", "minibatch", 0.5, 0);
  c.options.profile = true;
  const GradientReport report = run_case(c).report;
  ASSERT_TRUE(report.profile.has_value());
  double sum = 0, counting = 0;
  for (const auto& [name, seconds] : report.profile->seconds) {
    sum += seconds;
    if (name == part::kCounting) counting = seconds;
  }
  EXPECT_GT(counting, 0);
  EXPECT_EQ(counting, report.seconds.counting);
  EXPECT_NEAR(sum, report.seconds.total, 1e-12);  // rounding of a handful of additions
}

}  // namespace
}  // namespace espalier::testing
