// The critic's head and loss: every derivative against central differences of the value, and the kinks by hand.
#include <ATen/Context.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/allclose.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <ATen/ops/mv.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/zeros.h>
#include <gtest/gtest.h>

#include <cmath>
#include <vector>

#include "espalier/base/random.h"
#include "espalier/device/device.h"
#include "espalier/objective/denominator.h"
#include "espalier/objective/value_loss.h"
#include "espalier/ops/operations.h"

namespace espalier {
namespace {

// Central differences of a quadratic have no error in h; what is left is the rounding of two losses of a few operations
// each, 1e-15 of their size, divided by h. Losses are below 1 except where the size is named.
constexpr double kStep = 1e-4, kAllowed = 1e-15 / kStep;

TEST(ValueTerm, GradientIsTheSlopeAwayFromKinks) {
  Random random(71);
  int inside = 0, clipped = 0, outside = 0;
  for (int i = 0; i < 2000; ++i) {
    const double value = random.normal(), old_value = random.normal(), target = random.normal();
    const double cliprange = random.uniform(0.05, 1);
    const auto loss = [&](double v) { return value_term(v, old_value, target, cliprange).loss; };
    const ValueTerm term = value_term(value, old_value, target, cliprange);
    const double left = value_term(value - 2 * kStep, old_value, target, cliprange).gradient,
                 right = value_term(value + 2 * kStep, old_value, target, cliprange).gradient;
    if (std::abs(left - right) > 8 * kStep) continue;  // a kink between them: a slope changes by 1 per unit elsewhere
    EXPECT_NEAR(term.gradient, (loss(value + kStep) - loss(value - kStep)) / (2 * kStep),
                kAllowed * std::max(1.0, term.loss))
        << "case " << i;
    const bool within = std::abs(value - old_value) < cliprange;
    (within ? inside : term.clipped ? clipped : outside) += 1;
    EXPECT_EQ(term.gradient == 0, !within && term.clipped) << "case " << i;
  }
  EXPECT_GT(inside, 100);
  EXPECT_GT(clipped, 100);
  EXPECT_GT(outside, 100);
}

// max and min of equal numbers pass half to each, as in torch.
TEST(ValueTerm, AtTheBoundOfTheClipThreeQuartersPass) {
  const ValueTerm term = value_term(1.5, 1.0, 0.5, 0.5);  // v on the upper bound, both squares 1
  EXPECT_EQ(term.loss, 0.5);
  EXPECT_EQ(term.gradient, 0.75);
  EXPECT_FALSE(term.clipped);
}

TEST(ValueTerm, EqualSquaresPassHalfOfTheUnclippedSlope) {
  const ValueTerm term = value_term(2.0, 0.5, 1.5, 0.5);  // clipped to 1: squares 0.25 and 0.25
  EXPECT_EQ(term.loss, 0.125);
  EXPECT_EQ(term.gradient, 0.25);
}

std::vector<Rollout> two_rollouts() {
  std::vector<Rollout> rollouts(2);
  rollouts[0].prompt_ids = rollouts[1].prompt_ids = {1};
  rollouts[0].response_ids = {3, 4, 5}, rollouts[0].loss_mask = {1, 0, 1}, rollouts[0].values = {0.2, -0.4, 0.7};
  rollouts[1].response_ids = {6}, rollouts[1].loss_mask = {1}, rollouts[1].values = {-0.3};
  return rollouts;
}

TEST(ValueObjective, GradientIsTheSlopeOfTheLossInEveryAggregation) {
  const std::vector<Rollout> rollouts = two_rollouts();
  const std::vector<std::vector<double>> targets = {{0.5, 9, -0.2}, {0.4}};
  std::vector<std::vector<double>> values = {{0.1, 5, 1.6}, {-0.9}};
  for (const char* mode :
       {"token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"}) {
    Options options;
    options.loss_agg_mode = mode;
    const auto run = [&](std::vector<std::vector<double>>* gradient) {
      ValueObjective objective(rollouts, targets, options);
      for (std::int32_t i = 0; i < 2; ++i)
        for (std::int32_t t = 0; t < rollouts[i].response_length(); ++t) {
          const double slope = objective.add_token(i, t, values[i][t]);
          if (gradient) (*gradient)[i][t] = slope;
        }
      return objective.parts();
    };
    std::vector<std::vector<double>> gradient = values;
    const ValueLossParts parts = run(&gradient);
    EXPECT_EQ(parts.loss_tokens, 3);
    EXPECT_NEAR(parts.values_mean, (0.1 + 1.6 - 0.9) / 3, 1e-15);
    EXPECT_NEAR(parts.clip_fraction, 0, 0) << "1.6 and -0.9 lie beyond the clip, where the plain square is larger";
    EXPECT_EQ(gradient[0][1], 0) << "a masked token";
    for (std::size_t i = 0; i < 2; ++i)
      for (double& value : values[i]) {
        const double at = value;
        value = at + kStep;
        const double up = run(nullptr).loss;
        value = at - kStep;
        const double down = run(nullptr).loss;
        value = at;
        EXPECT_NEAR(gradient[i][static_cast<std::size_t>(&value - values[i].data())], (up - down) / (2 * kStep),
                    kAllowed)
            << mode;
      }
  }
}

TEST(ValueHead, GradientsAreTheSlopesOfItsValues) {
  at::manual_seed(72);
  const std::int64_t O = 7, M = 12;
  const at::Tensor hidden = at::randn({O, M}, at::kDouble), weight = at::randn({M}, at::kDouble);
  const at::Tensor bias = at::randn({1}, at::kDouble);
  std::vector<double> outer(O);
  for (double& g : outer) g = at::randn({1}, at::kDouble).item<double>();
  const Operations& ops = cpu_device().operations();
  const auto weighted_sum = [&] {
    const at::Tensor value = at::empty({O}, at::kDouble);
    ops.value(hidden, weight, bias, value);
    double sum = 0;
    for (std::int64_t o = 0; o < O; ++o) sum += outer[o] * value[o].item<double>();
    return sum;
  };
  // The gradient of hidden is overwritten, the others are added to.
  const at::Tensor grad_hidden = at::full({O, M}, 7.0, at::kDouble), grad_weight = at::full({M}, 2.0, at::kDouble),
                   grad_bias = at::full({1}, 3.0, at::kDouble);
  ops.add_value_backward(hidden, weight, at::tensor(outer, at::kDouble), grad_hidden, grad_weight, grad_bias);
  const auto expect_slopes = [&](const at::Tensor& x, const at::Tensor& gradient, double before) {
    double* p = x.data_ptr<double>();
    for (std::int64_t i = 0; i < x.numel(); ++i) {
      const double at = p[i];
      p[i] = at + kStep;
      const double up = weighted_sum();
      p[i] = at - kStep;
      const double down = weighted_sum();
      p[i] = at;
      EXPECT_NEAR(gradient.data_ptr<double>()[i] - before, (up - down) / (2 * kStep), 10 * kAllowed);  // sums of O M
    }
  };
  expect_slopes(hidden, grad_hidden, 0);
  expect_slopes(weight, grad_weight, 2);
  expect_slopes(bias, grad_bias, 3);
}

// bfloat16: exact products, sums in double, gradients of weights in float32; grad_hidden is rounded once.
TEST(ValueHead, LowerDtypesRoundOnce) {
  at::manual_seed(73);
  for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16}) {
    const at::Tensor hidden = at::randn({300, 160}).to(dtype), weight = at::randn({160}).to(dtype);
    const at::Tensor bias = at::randn({1}).to(dtype);
    const Operations& ops = cpu_device().operations();
    const at::Tensor value = at::empty({300}, at::kDouble);
    ops.value(hidden, weight, bias, value);
    const at::Tensor exact = at::mv(hidden.to(at::kDouble), weight.to(at::kDouble)) + bias.to(at::kDouble);
    for (std::int64_t o = 0; o < 300; ++o) EXPECT_NEAR(value[o].item<double>(), exact[o].item<double>(), 1e-12);
    const at::Tensor grad_hidden = at::empty({300, 160}, dtype), grad_weight = at::zeros({160}),
                     grad_bias = at::zeros({1});
    ops.add_value_backward(hidden, weight, at::full({300}, 0.37, at::kDouble), grad_hidden, grad_weight, grad_bias);
    const at::Tensor rows = (at::full({300, 1}, 0.37, at::kDouble) * weight.to(at::kDouble)).to(at::kFloat).to(dtype);
    EXPECT_TRUE(grad_hidden.equal(rows));
    const at::Tensor sums = 0.37 * hidden.to(at::kDouble).sum(0);
    // One rounding to float32 of sums that are exact to 1e-14.
    EXPECT_TRUE(at::allclose(grad_weight.to(at::kDouble), sums, 1.2e-7, 1e-12));
    EXPECT_NEAR(grad_bias.item<double>(), 300 * 0.37, 1e-5);
  }
}

}  // namespace
}  // namespace espalier
