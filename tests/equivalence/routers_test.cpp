// Router losses and loads: every plan and both scopes give those of a dense autograd run, a shared token counted once
// for each rollout that has it.
#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <cmath>
#include <numeric>

#include "espalier/base/error.h"
#include "espalier/model/dispatch.h"
#include "tests/equivalence/fixture.h"

namespace espalier::testing {
namespace {

// Required of every gradient in float64 (relative L2, each parameter).
constexpr double kFloat64 = 1e-10;

RolloutOptions ragged() {
  RolloutOptions options;
  options.groups = 3;
  options.group_size = {1, 4};
  options.prompt_length = {1, 14};
  options.response_length = {1, 10};
  options.shared_start = 0.4, options.equal_response = 0.1, options.empty_response = 0.2;
  options.continues = 0.3, options.mask_gap = 0.3, options.fully_masked = 0.1;
  options.nested_prompt = 0.3, options.late_difference = 0.2;
  options.policy = PolicyAge::far;
  options.temperature_low = 0.7, options.temperature_high = 1.3;
  return options;
}

Case router_case(const std::string& family, const std::string& scope, double aux, double z) {
  Case c;
  c.family = family;
  c.rollouts = ragged();
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

TEST(Routers, ScopesDiffer) {
  const Case one = router_case("qwen3-moe", "rollout", 0.5, 0), all = router_case("qwen3-moe", "minibatch", 0.5, 0);
  EXPECT_GT(std::abs(run_oracle(one).aux_loss - run_oracle(all).aux_loss), 1e-3);
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
    const at::Tensor gradient = run(model->weights).gradient;
    at::Tensor direction = at::zeros_like(model->weights);
    for (const Parameter& p : model->table.parameters())
      if (p.name.ends_with("mlp.gate.weight") || p.name.ends_with("q_proj.weight"))
        direction.narrow(0, p.offset, p.count).fill_(1).cos_().narrow(0, 0, p.count / 2).neg_();
    direction /= direction.norm();
    constexpr double kStep = 1e-6;  // errs by 1e-16 f / h = 1e-10 times the loss, and a term in h^2
    const double slope =
        (run(model->weights + kStep * direction).loss - run(model->weights - kStep * direction).loss) / (2 * kStep);
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

}  // namespace
}  // namespace espalier::testing
