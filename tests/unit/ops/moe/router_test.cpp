// Routing: which experts, what weights, and the derivative of both losses and weights.
#include "espalier/ops/cpu/router_kernels.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <vector>

#include "espalier/base/random.h"

namespace espalier::moe {
namespace {

template <class T = double>
struct Choice {
  std::vector<std::int32_t> experts;
  std::vector<accumulator_t<T>> weight;
};

template <class T = double>
Choice<T> choose(const RouterShape& shape, const std::vector<T>& logits) {
  Choice<T> out;
  out.experts.resize(static_cast<std::size_t>(shape.rows * shape.chosen));
  out.weight.resize(out.experts.size());
  choose_experts<T>(shape, logits.data(), nullptr, out.experts.data(), out.weight.data());
  return out;
}

TEST(Router, TiesGoToTheLowerExpert) {
  EXPECT_EQ(choose({1, 5, 3, true}, {0, 0, 0, 0, 0}).experts, (std::vector<std::int32_t>{0, 1, 2}));
  EXPECT_EQ(choose({1, 5, 2, true}, {1, 7, 3, 7, 7}).experts, (std::vector<std::int32_t>{1, 3}));
  EXPECT_EQ(choose({1, 5, 3, true}, {3, 1, 3, 9, 1}).experts, (std::vector<std::int32_t>{3, 0, 2}));
  EXPECT_EQ(choose<float>({2, 3, 1, false}, {2, 2, 1, 1, 2, 2}).experts, (std::vector<std::int32_t>{0, 1}));
}

TEST(Router, ChoosesTheLargestByFallingProbability) {
  Random random(3);
  for (const std::int64_t experts : {2, 3, 8, 16, 128})
    for (const std::int64_t chosen : {std::int64_t{1}, std::int64_t{2}, std::min<std::int64_t>(8, experts), experts}) {
      const RouterShape shape{300, experts, std::min(chosen, experts), true};
      std::vector<double> logits(static_cast<std::size_t>(shape.rows * experts));
      for (double& value : logits) value = 3 * random.normal();
      const Choice<> choice = choose(shape, logits);
      for (std::int64_t r = 0; r < shape.rows; ++r) {
        std::vector<std::int32_t> order(static_cast<std::size_t>(experts));
        std::iota(order.begin(), order.end(), 0);
        std::stable_sort(order.begin(), order.end(), [&](auto a, auto b) {
          return logits[static_cast<std::size_t>(r * experts + a)] > logits[static_cast<std::size_t>(r * experts + b)];
        });
        for (std::int64_t j = 0; j < shape.chosen; ++j)
          ASSERT_EQ(choice.experts[static_cast<std::size_t>(r * shape.chosen + j)], order[static_cast<std::size_t>(j)]);
      }
    }
}

TEST(Router, WeightsAreProbabilitiesOrTheirShares) {
  const std::vector<double> logits{std::log(1.0), std::log(4.0), std::log(3.0), std::log(2.0)};
  const Choice<> plain = choose({1, 4, 2, false}, logits), shares = choose({1, 4, 2, true}, logits);
  EXPECT_NEAR(plain.weight[0], 0.4, 1e-15);
  EXPECT_NEAR(plain.weight[1], 0.3, 1e-15);
  EXPECT_NEAR(shares.weight[0], 4.0 / 7, 1e-15);
  EXPECT_NEAR(shares.weight[1], 3.0 / 7, 1e-15);
}

TEST(Router, RecordedExpertsAreTakenWithTheirOwnProbabilities) {
  const RouterShape plain{2, 4, 2, false}, shares{2, 4, 2, true};
  const std::vector<double> logits{std::log(1.0), std::log(4.0), std::log(3.0), std::log(2.0), 0, 0, 1, 0};
  const std::int32_t recorded[] = {0, 3, -1, -1};  // the second row is free
  for (const RouterShape& shape : {plain, shares}) {
    std::vector<std::int32_t> choice(4);
    std::vector<double> weight(4);
    choose_experts<double>(shape, logits.data(), recorded, choice.data(), weight.data());
    EXPECT_EQ(choice, (std::vector<std::int32_t>{0, 3, 2, 0}));
    EXPECT_NEAR(weight[0], shape.renormalise ? 1.0 / 3 : 0.1, 1e-15);
    EXPECT_NEAR(weight[1], shape.renormalise ? 2.0 / 3 : 0.2, 1e-15);
    const Choice<> free = choose({1, 4, 2, shape.renormalise}, {0, 0, 1, 0});
    EXPECT_EQ(weight[2], free.weight[0]);
  }
}

TEST(Router, LargeLogitsDoNotOverflow) {
  const Choice<float> choice = choose<float>({1, 3, 2, false}, {1e30f, -1e30f, 1e30f});
  EXPECT_EQ(choice.experts, (std::vector<std::int32_t>{0, 2}));
  EXPECT_EQ(choice.weight[0], 0.5f);
}

TEST(Router, ExpertsStayDistinctWhenLogitsAreNotNumbers) {
  const double nan = std::numeric_limits<double>::quiet_NaN();
  std::vector<std::int32_t> experts = choose({1, 4, 3, true}, {nan, 1, nan, 2}).experts;
  std::sort(experts.begin(), experts.end());
  EXPECT_EQ(std::unique(experts.begin(), experts.end()), experts.end());
  EXPECT_GE(experts.front(), 0);
  EXPECT_LT(experts.back(), 4);
}

// sum_j a_j w_j + sum_e g_e p_e + z lse^2 of one row, written out.
double loss_of(const std::vector<double>& logits, const std::vector<std::int32_t>& choice, bool renormalise,
               const std::vector<double>& a, const std::vector<double>& g, double z) {
  double sum = 0, chosen = 0, loss = 0;
  for (const double value : logits) sum += std::exp(value);
  for (const std::int32_t e : choice) chosen += std::exp(logits[static_cast<std::size_t>(e)]) / sum;
  for (std::size_t j = 0; j < choice.size(); ++j)
    loss += a[j] * std::exp(logits[static_cast<std::size_t>(choice[j])]) / sum / (renormalise ? chosen : 1);
  for (std::size_t e = 0; e < logits.size(); ++e) loss += g[e] * std::exp(logits[e]) / sum;
  return loss + z * std::log(sum) * std::log(sum);
}

TEST(Router, BackwardIsTheSlopeOfWeightsAndPenalties) {
  Random random(9);
  const auto values = [&](std::size_t count) {
    std::vector<double> out(count);
    for (double& value : out) value = random.normal();
    return out;
  };
  for (const bool renormalise : {false, true})
    for (const std::int64_t chosen : {1, 2, 5}) {
      const RouterShape shape{1, 5, chosen, renormalise};
      const std::vector<double> logits = values(5), a = values(static_cast<std::size_t>(chosen)), g = values(5);
      const double z = 0.3;
      const Choice<> choice = choose(shape, logits);
      const std::int32_t group = 0;
      std::vector<double> grad(5);
      const PenaltySums sums = router_backward<double>(shape, logits.data(), choice.experts.data(), a.data(),
                                                       {&group, g.data(), &z}, grad.data());
      const std::vector<double> none_a(a.size()), none_g(5);
      EXPECT_NEAR(sums.aux, loss_of(logits, choice.experts, renormalise, none_a, g, 0), 1e-14);
      EXPECT_NEAR(sums.z, loss_of(logits, choice.experts, renormalise, none_a, none_g, z), 1e-14);
      for (std::size_t e = 0; e < 5; ++e) {
        constexpr double kStep = 1e-5;  // central differences err by h^2 f''' / 6 + 1e-16 f / h, about 1e-10
        std::vector<double> up = logits, down = logits;
        up[e] += kStep, down[e] -= kStep;
        const double slope =
            (loss_of(up, choice.experts, renormalise, a, g, z) - loss_of(down, choice.experts, renormalise, a, g, z)) /
            (2 * kStep);
        EXPECT_NEAR(grad[e], slope, 1e-8) << "expert " << e << ", k " << chosen << ", renormalise " << renormalise;
      }
    }
}

}  // namespace
}  // namespace espalier::moe
