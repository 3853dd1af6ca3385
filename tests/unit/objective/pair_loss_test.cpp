// The loss of a pair against its definition, and its derivative against differences of the loss.
#include "espalier/objective/pair_loss.h"

#include <gtest/gtest.h>

#include <cmath>

#include "espalier/base/error.h"

namespace espalier {
namespace {

Options with(const char* loss, double beta, double smoothing = 0) {
  Options options;
  set_option(options, "dpo-loss", loss);
  options.dpo_beta = beta;
  options.label_smoothing = smoothing;
  return options;
}

TEST(PairLoss, IsTheFormulaOfItsName) {
  const OfAnswers policy{-10, -12}, reference{-11, -9}, tokens{4, 2};
  const double d = 1 - -3, beta = 0.3, right = std::log1p(std::exp(-beta * d)), wrong = std::log1p(std::exp(beta * d));
  EXPECT_NEAR(pair_term(with("sigmoid", beta), policy, reference, tokens).loss, right, 1e-15);
  EXPECT_NEAR(pair_term(with("sigmoid", beta, 0.1), policy, reference, tokens).loss, 0.9 * right + 0.1 * wrong, 1e-15);
  EXPECT_NEAR(pair_term(with("robust", beta, 0.1), policy, reference, tokens).loss, (0.9 * right - 0.1 * wrong) / 0.8,
              1e-15);
  EXPECT_NEAR(pair_term(with("hinge", beta), policy, reference, tokens).loss, 0, 0);
  EXPECT_NEAR(pair_term(with("hinge", 0.1), policy, reference, tokens).loss, 1 - 0.4, 1e-15);
  EXPECT_NEAR(pair_term(with("ipo", beta), policy, reference, tokens).loss,
              std::pow(1 / 4.0 + 3 / 2.0 - 1 / (2 * beta), 2), 1e-15);
}

TEST(PairLoss, HasTheDerivativeOfDifferences) {
  const OfAnswers reference{-11, -9}, tokens{4, 2};
  constexpr double h = 1e-5;
  for (const Options& options : {with("sigmoid", 0.3), with("sigmoid", 0.3, 0.2), with("robust", 0.3, 0.2),
                                 with("hinge", 0.05), with("hinge", 2), with("ipo", 0.3)})
    for (const OfAnswers& policy : {OfAnswers{-10, -12}, OfAnswers{-14, -7}, OfAnswers{-40, -2}}) {
      const auto loss = [&](double chosen, double rejected) {
        return pair_term(options, {policy.chosen + chosen, policy.rejected + rejected}, reference, tokens).loss;
      };
      const PairTerm term = pair_term(options, policy, reference, tokens);
      // The error of a central difference: h^2 of the third derivative, and rounding of the loss over h.
      const double allowed = 1e-9 + 0x1p-50 * term.loss / h;
      EXPECT_NEAR(term.gradient.chosen, (loss(h, 0) - loss(-h, 0)) / (2 * h), allowed) << options.dpo_loss;
      EXPECT_NEAR(term.gradient.rejected, (loss(0, h) - loss(0, -h)) / (2 * h), allowed) << options.dpo_loss;
    }
}

TEST(PairLoss, StaysFiniteFarOut) {
  for (const double far : {-1e4, 1e4}) {
    const PairTerm term = pair_term(with("sigmoid", 1), {far, 0}, {}, {1, 1});
    EXPECT_TRUE(std::isfinite(term.loss) && std::isfinite(term.gradient.chosen));
    EXPECT_NEAR(term.loss, far < 0 ? 1e4 : 0, 1e-9);
  }
}

std::vector<Rollout> pair_of(std::int64_t number) {
  std::vector<Rollout> out(2);
  for (int side = 0; side < 2; ++side) {
    out[side].prompt_ids = {1};
    out[side].response_ids = {2, 3, 4};
    out[side].loss_mask = {1, 0, 1};
    out[side].pair = {number, side == 0, std::nullopt, std::nullopt};
  }
  return out;
}

TEST(PairLoss, LeavesMaskedTokensOutOfTheSums) {
  const std::vector<Rollout> pair = pair_of(0);
  const std::vector<std::vector<double>> logprobs{{-1, -100, -2}, {-3, -7, -4}};
  const LinearPairs found = linear_pairs(pair, logprobs, std::vector<double>{0, 0}, with("sigmoid", 0.5));
  EXPECT_DOUBLE_EQ(found.means.logprob.chosen, -3);
  EXPECT_DOUBLE_EQ(found.means.logprob.rejected, -7);
  EXPECT_DOUBLE_EQ(found.means.margin, 2);
  EXPECT_EQ(found.means.accuracy, 1);
  EXPECT_GT(found.advantages[0][0], 0);
  EXPECT_LT(found.advantages[1][0], 0);
}

TEST(PairLoss, RefusesARecordWithoutAPair) {
  std::vector<Rollout> one = pair_of(0);
  one[1].pair = {};
  const std::vector<std::vector<double>> logprobs{{-1, -1, -1}, {-1, -1, -1}};
  EXPECT_THROW(linear_pairs(one, logprobs, std::vector<double>{0, 0}, Options()), InputError);
}

}  // namespace
}  // namespace espalier
