// Policy losses, KL estimators and importance weights at single points worked out by hand.
#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "espalier/base/error.h"
#include "espalier/objective/kl.h"
#include "espalier/objective/policy_loss.h"
#include "espalier/objective/rollout_weights.h"

namespace espalier {
namespace {

constexpr double kOld = -2.0;

// exp(log(r) + kOld - kOld) comes back as r up to the rounding of three operations on numbers up to 3.
constexpr double kRoundingOfRatios = 1e-14;

PolicyTerm at_ratio(PolicyLoss loss, double ratio, double advantage) {
  PolicySettings settings;
  settings.loss = loss;
  return policy_term(settings, {kOld + std::log(ratio), kOld, advantage});
}

KlType kl_type(const std::string& word) { return kl_type_of(Choice<KlLossType>(word)); }

struct Point {
  double ratio, advantage, value, gradient;
  bool clipped;
};

void expect_points(PolicyLoss loss, std::initializer_list<Point> points) {
  for (const Point& p : points) {
    const PolicyTerm term = at_ratio(loss, p.ratio, p.advantage);
    EXPECT_NEAR(term.value, p.value, kRoundingOfRatios * 100) << p.ratio << " " << p.advantage;
    EXPECT_NEAR(term.gradient, p.gradient, kRoundingOfRatios * 100) << p.ratio << " " << p.advantage;
    EXPECT_EQ(term.clipped, p.clipped) << p.ratio << " " << p.advantage;
  }
}

TEST(PolicyLoss, VanillaClipsOnTheSideThatHelps) {
  expect_points(PolicyLoss::vanilla, {{1.5, 1.0, -1.2, 0.0, true},
                                      {0.5, 1.0, -0.5, -0.5, false},
                                      {1.1, 2.0, -2.2, -2.2, false},
                                      {1.5, -1.0, 1.5, 1.5, false},
                                      {0.5, -1.0, 0.8, 0.0, true},
                                      {5.0, -1.0, 3.0, 0.0, false},  // dual clip
                                      {5.0, 1.0, -1.2, 0.0, true},   // never for positive advantages
                                      {0.5, 0.0, 0.0, 0.0, false}});
}

TEST(PolicyLoss, VanillaHalvesTheGradientWhereDualClipTies) {
  PolicySettings settings;
  settings.dual_clip = 1.0;
  const PolicyTerm term = policy_term(settings, {kOld, kOld, -1.0});
  EXPECT_EQ(term.value, 1.0);
  EXPECT_EQ(term.gradient, 0.5);
}

TEST(PolicyLoss, LogRatiosBeyondTwentyHaveNoGradient) {
  PolicySettings settings;
  settings.dual_clip = 1e300;
  EXPECT_EQ(policy_term(settings, {18.0, -2.0, -1.0}).gradient, std::exp(20.0));  // at the bound it still passes
  EXPECT_EQ(policy_term(settings, {18.5, -2.0, -1.0}).gradient, 0.0);
  EXPECT_EQ(policy_term(settings, {18.5, -2.0, -1.0}).value, std::exp(20.0));
  EXPECT_EQ(policy_term(settings, {-900.0, -2.0, 1.0}).value, -std::exp(-20.0));
}

TEST(PolicyLoss, CispoWeighsTheLogProbByTheClippedRatio) {
  const double lp = kOld + std::log(1.5);
  expect_points(PolicyLoss::cispo, {{1.5, 1.0, -1.2 * lp, -1.2, true},
                                    {1.5, -1.0, 1.2 * lp, 1.2, true},
                                    {0.5, 1.0, -0.8 * (kOld + std::log(0.5)), -0.8, true},
                                    {1.0, 2.0, -2.0 * kOld, -2.0, false}});
}

TEST(PolicyLoss, SapoGatesByTheSignOfTheAdvantage) {
  // At ratio 1 the gate is sigma(0) = 1/2 and its derivative 4 * 1/4.
  expect_points(PolicyLoss::sapo, {{1.0, 1.0, -2.0, -1.0, false}, {1.0, -1.0, 2.0 / 1.05, 1.0, false}});
  const double gate = 1 / (1 + std::exp(-1.0));  // ratio 2, temperature 1
  expect_points(PolicyLoss::sapo, {{2.0, 1.0, -4 * gate, -4 * gate * (1 - gate) * 2, false}});
}

TEST(PolicyLoss, GpgAndReinforceAreTheLogProbTimesTheAdvantage) {
  for (PolicyLoss loss : {PolicyLoss::gpg, PolicyLoss::reinforce})
    expect_points(loss, {{7.0, 3.0, -3.0 * (kOld + std::log(7.0)), -3.0, false}});
}

// Probabilities 0.5 -> 0.5 r, held against bounds of 0.2 on their difference.
PolicyTerm moved_by(PolicyLoss loss, double ratio, double advantage) {
  PolicySettings settings;
  settings.loss = loss;
  return policy_term(settings, {std::log(0.5 * ratio), std::log(0.5), advantage});
}

TEST(PolicyLoss, DppoDropsTokensThatMovedTooFarTowardsTheirAdvantage) {
  for (const PolicyLoss loss : {PolicyLoss::dppo_tv, PolicyLoss::dppo}) {
    EXPECT_TRUE(moved_by(loss, 1.5, 1.0).clipped);  // 0.75 - 0.5 > 0.2
    EXPECT_FALSE(moved_by(loss, 1.3, 1.0).clipped);
    EXPECT_FALSE(moved_by(loss, 0.5, 1.0).clipped);  // the other side
    EXPECT_TRUE(moved_by(loss, 0.5, -1.0).clipped);
    EXPECT_FALSE(moved_by(loss, 1.5, -1.0).clipped);
    EXPECT_TRUE(moved_by(loss, 0.5, 0.0).clipped);  // without an advantage the lower bound holds
  }
  EXPECT_NEAR(moved_by(PolicyLoss::dppo_tv, 1.3, 2.0).gradient, -2 * 1.3, kRoundingOfRatios * 100);
  EXPECT_NEAR(moved_by(PolicyLoss::dppo_tv, 1.3, 2.0).value, -2 * 1.3 * std::log(0.65), kRoundingOfRatios * 100);
  EXPECT_EQ(moved_by(PolicyLoss::dppo_tv, 1.5, 1.0).gradient, 0.0);
  const double log_ratio = std::log(1.3), dropped = std::log(1.5);
  EXPECT_NEAR(moved_by(PolicyLoss::dppo, 1.3, 2.0).value, -2 * 1.3 + 1e-3 * log_ratio * log_ratio,
              kRoundingOfRatios * 100);
  EXPECT_NEAR(moved_by(PolicyLoss::dppo, 1.3, 2.0).gradient, -2 * 1.3 + 2e-3 * log_ratio, kRoundingOfRatios * 100);
  EXPECT_NEAR(moved_by(PolicyLoss::dppo, 1.5, 2.0).gradient, 2e-3 * dropped, kRoundingOfRatios);  // the KL stays
}

TEST(PolicyLoss, DppoKlBoundsTheKlOfTwoOutcomes) {
  // KL(0.5 || 0.85) = 0.5 log(0.5 / 0.85) + 0.5 log(0.5 / 0.15) = 0.337; KL(0.5 || 0.65) = 0.047.
  EXPECT_TRUE(moved_by(PolicyLoss::dppo_kl, 1.7, 1.0).clipped);
  EXPECT_FALSE(moved_by(PolicyLoss::dppo_kl, 1.3, 1.0).clipped);
  EXPECT_FALSE(moved_by(PolicyLoss::dppo_kl, 1.7, -1.0).clipped);
  EXPECT_TRUE(moved_by(PolicyLoss::dppo_kl, 0.3, -1.0).clipped);
}

TEST(PolicyLoss, IcePopDropsTokensOutsideTheBand) {
  expect_points(PolicyLoss::icepop, {{1.5, 2.0, -3.0, -3.0, false},
                                     {4.9, -1.0, 4.9, 4.9, false},
                                     {5.1, -1.0, 0.0, 0.0, true},
                                     {0.19, 1.0, 0.0, 0.0, true}});
}

TEST(PolicyLoss, GspoClipsTheSequenceRatioWithoutDualClip) {
  PolicySettings settings;
  settings.loss = PolicyLoss::gspo;
  EXPECT_EQ(policy_term(settings, {0, 0, 1.0, std::log(1.5)}).value, -1.2);
  EXPECT_EQ(policy_term(settings, {0, 0, 1.0, std::log(1.5)}).gradient, 0.0);
  EXPECT_NEAR(policy_term(settings, {0, 0, -1.0, std::log(5.0)}).value, 5.0, kRoundingOfRatios * 100);
  EXPECT_NEAR(policy_term(settings, {0, 0, -1.0, std::log(5.0)}).gradient, 5.0, kRoundingOfRatios * 100);
  EXPECT_EQ(policy_term(settings, {0, 0, -1.0, 11.0}).value, std::exp(10.0));
  EXPECT_EQ(policy_term(settings, {0, 0, -1.0, 11.0}).gradient, 0.0);
  EXPECT_EQ(policy_term(settings, {0, 0, -1.0, 10.0}).gradient, std::exp(10.0));
}

TEST(PolicyLoss, TheRatioOfTheUnclippedBranchIsCapped) {
  PolicySettings settings;
  settings.dual_clip = std::numeric_limits<double>::infinity();
  settings.ratio_cap = 4;
  EXPECT_NEAR(policy_term(settings, {kOld + std::log(5.0), kOld, -1.0}).value, 4.0, kRoundingOfRatios * 100);
  EXPECT_EQ(policy_term(settings, {kOld + std::log(5.0), kOld, -1.0}).gradient, 0.0);
  EXPECT_NEAR(policy_term(settings, {kOld + std::log(3.0), kOld, -1.0}).gradient, 3.0, kRoundingOfRatios * 100);
  // The clip fraction compares what the maximum compares: min(r, cap) with clip(r).
  EXPECT_FALSE(policy_term(settings, {kOld + std::log(5.0), kOld, -1.0}).clipped);
  settings.ratio_cap = 1.1;  // below the clip: positive advantages meet it too
  EXPECT_TRUE(policy_term(settings, {kOld + std::log(5.0), kOld, -1.0}).clipped);
  EXPECT_NEAR(policy_term(settings, {kOld + std::log(1.15), kOld, 1.0}).value, -1.1, kRoundingOfRatios * 100);
  EXPECT_EQ(policy_term(settings, {kOld + std::log(1.15), kOld, 1.0}).gradient, 0.0);
}

TEST(PolicyLoss, WithoutABoundLogRatiosKeepTheirGradient) {
  PolicySettings settings;
  settings.dual_clip = settings.log_ratio_bound = std::numeric_limits<double>::infinity();
  EXPECT_EQ(policy_term(settings, {23.0, -2.0, -1.0}).gradient, std::exp(25.0));
  settings.level = RatioLevel::sequence;
  EXPECT_EQ(policy_term(settings, {0, 0, -1.0, 12.0}).gradient, std::exp(12.0));
}

TEST(PolicyLoss, VespoWeighsBySignAndIsReinforceAtRatioOne) {
  PolicySettings settings;
  settings.loss = PolicyLoss::vespo;
  EXPECT_EQ(policy_term(settings, {kOld, kOld, 3.0, 0, 0}).value, 6.0);
  EXPECT_EQ(policy_term(settings, {kOld, kOld, -3.0, 0, 0}).gradient, 3.0);
  // phi(2) = exp(k log 2 - lambda): 2^2 exp(-3) and 2^3 exp(-2).
  EXPECT_NEAR(policy_term(settings, {kOld, kOld, 1.0, 0, std::log(2.0)}).gradient, -4 * std::exp(-3.0),
              kRoundingOfRatios);
  EXPECT_NEAR(policy_term(settings, {kOld, kOld, -1.0, 0, std::log(2.0)}).gradient, 8 * std::exp(-2.0),
              kRoundingOfRatios);
  EXPECT_EQ(policy_term(settings, {kOld, kOld, 1.0, 0, 50.0}).gradient,
            policy_term(settings, {kOld, kOld, 1.0, 0, 20.0}).gradient);
}

TEST(KlEstimators, UnboundedGoesOnWhereLowVarianceStops) {
  for (const char* name : {"k3_unbounded", "k3_unbiased"}) {
    const KlTerm far = kl_term(kl_type(name), -1.0, 4.0);
    EXPECT_NEAR(far.value, std::exp(5.0) - 6, 1e-12);  // numbers below 150, a few roundings of 2^-52 x 150
    EXPECT_NEAR(far.gradient, 1 - std::exp(5.0), 1e-12);
  }
}

TEST(KlEstimators, HaveTheValuesOfTheirFormulas) {
  const double x = 0.5;  // lp - ref
  EXPECT_EQ(kl_term(kl_type("kl"), -1.0, -1.5).value, x);
  EXPECT_EQ(kl_term(kl_type("k1"), -1.0, -1.5).gradient, 1.0);
  EXPECT_EQ(kl_term(kl_type("abs"), -1.5, -1.0).value, x);
  EXPECT_EQ(kl_term(kl_type("abs"), -1.5, -1.0).gradient, -1.0);
  EXPECT_EQ(kl_term(kl_type("abs"), -1.0, -1.0).gradient, 0.0);
  EXPECT_EQ(kl_term(kl_type("mse"), -1.0, -1.5).value, 0.125);
  EXPECT_EQ(kl_term(kl_type("k2"), -1.0, -1.5).gradient, x);
  EXPECT_NEAR(kl_term(kl_type("low_var_kl"), -1.0, -1.5).value, std::exp(-x) + x - 1, 1e-15);
  EXPECT_NEAR(kl_term(kl_type("k3"), -1.0, -1.5).gradient, 1 - std::exp(-x), 1e-15);
}

TEST(KlEstimators, LowVarianceStopsAtItsBounds) {
  const KlTerm far_above = kl_term(kl_type("k3"), -1.0, 4.0);  // e^5 - 6 is above 10
  EXPECT_EQ(far_above.value, 10.0);
  EXPECT_EQ(far_above.gradient, 0.0);
  const KlTerm far_below = kl_term(kl_type("k3"), -1.0, -40.0);  // exponent -39, held at -20
  EXPECT_EQ(far_below.value, 10.0);
  EXPECT_EQ(far_below.gradient, 0.0);
}

TEST(KlEstimators, PlusKeepsTheValueWithTheGradientOfK2) {
  for (const char* name : {"kl", "k1", "abs", "mse", "k2", "low_var_kl", "k3"}) {
    const KlTerm plain = kl_term(kl_type(name), -1.0, 4.0);
    const KlTerm plus = kl_term(kl_type(std::string(name) + "+"), -1.0, 4.0);
    EXPECT_EQ(plus.value, plain.value) << name;
    EXPECT_EQ(plus.gradient, -5.0) << name;
  }
  EXPECT_THROW(kl_type("full"), OptionError);
  EXPECT_THROW(kl_type("+"), OptionError);
}

TEST(RolloutWeights, AreTruncatedAboveOnlyUnlessAFloorIsGiven) {
  RolloutWeights weights{.level = RolloutCorrection::token};
  EXPECT_EQ(weights.weight(0.0), 1.0);
  EXPECT_EQ(weights.weight(5.0), 2.0);
  EXPECT_EQ(weights.weight(-3.0), std::exp(-3.0));
  EXPECT_EQ(weights.weight(-500.0), std::exp(-20.0));
  weights.threshold = 1e300;
  EXPECT_EQ(weights.weight(500.0), std::exp(20.0));
  weights.floor = 0.5;
  EXPECT_EQ(weights.weight(-3.0), 0.5);
}

TEST(RolloutWeights, MaskedOnesAreZeroBeyondTheirBounds) {
  const RolloutWeights weights{
      .level = RolloutCorrection::token, .beyond = OutOfBounds::mask, .floor = 0.5, .threshold = 2};
  EXPECT_EQ(weights.weight(0.25), std::exp(0.25));
  EXPECT_EQ(weights.weight(1.0), 0.0);
  EXPECT_EQ(weights.weight(-1.0), 0.0);
}

}  // namespace
}  // namespace espalier
