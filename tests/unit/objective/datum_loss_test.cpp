// Losses of the service's data against their formulas, written out here with differences in place of derivatives.
#include "espalier/objective/datum_loss.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>

namespace espalier {
namespace {

// Central differences of a formula that is smooth near the point: h^2 of truncation and 1e-16 / h of rounding.
constexpr double kStep = 1e-5, kDifference = 1e-8;

double clip(double x, double low, double high) { return std::min(std::max(x, low), high); }

// The datum's loss as docs/serve.md has it. `held`: log-probs that are constants.
double formula(const DatumTerms& t, const std::vector<double>& lp, const std::vector<double>& held) {
  double sum = 0, mean = 0, count = 0;
  if (t.kind == DatumLossKind::gspo)
    for (std::size_t i = 0; i < lp.size(); ++i)
      if (t.in_mean[i]) mean += held[i] - t.old_logprob[i], count += 1;
  if (count > 0) mean /= count;
  for (std::size_t i = 0; i < lp.size(); ++i) {
    const double w = t.weight[i], q = t.old_logprob.empty() ? 0 : t.old_logprob[i];
    const double low = t.ratio_low.empty() ? 0 : t.ratio_low[t.ratio_low.size() == 1 ? 0 : i];
    const double high = t.ratio_high.empty() ? 0 : t.ratio_high[t.ratio_high.size() == 1 ? 0 : i];
    const double r = t.kind == DatumLossKind::gspo ? std::exp(mean + lp[i] - held[i]) : std::exp(lp[i] - q);
    switch (t.kind) {
      case DatumLossKind::cross_entropy:
        sum -= w * lp[i];
        break;
      case DatumLossKind::importance_sampling:
        sum -= r * w;
        break;
      case DatumLossKind::ppo:
      case DatumLossKind::gspo:
        sum -= std::min(r * w, clip(r, low, high) * w);
        break;
      case DatumLossKind::cispo:
        sum -= clip(std::exp(held[i] - q), low, high) * lp[i] * w;
        break;
      case DatumLossKind::dro:
        sum -= lp[i] * w - 0.5 * t.beta * (lp[i] - q) * (lp[i] - q);
    }
  }
  return sum;
}

DatumTerms terms_of(DatumLossKind kind) {
  DatumTerms t;
  t.kind = kind;
  t.weight = {1.5, -0.7, 0.4, -2, 0, 0.9, -1.1};
  if (kind != DatumLossKind::cross_entropy) t.old_logprob = {-1, -2.5, -3, -0.2, -4, -2, -1.3};
  t.in_mean = {1, 1, 0, 1, 0, 0, 1};
  t.ratio_low = {0.8}, t.ratio_high = {1.2};
  t.beta = 0.3;
  return t;
}

const std::vector<double> kLogprob{-1.4, -2.2, -2.95, -1.1, -3, -1.2, -1.32};

void expect_formula(const DatumTerms& terms) {
  const std::vector<DatumTerms> all{terms};
  std::vector<double> gradient(kLogprob.size(), 7), entropy(kLogprob.size(), 7);
  DatumLoss loss(all);
  loss.add_rollout(0, kLogprob, kLogprob, gradient, entropy);
  EXPECT_NEAR(loss.loss(0), formula(terms, kLogprob, kLogprob), 1e-14);
  for (std::size_t i = 0; i < kLogprob.size(); ++i) {
    std::vector<double> more = kLogprob, less = kLogprob;
    more[i] += kStep, less[i] -= kStep;
    EXPECT_NEAR(gradient[i], (formula(terms, more, kLogprob) - formula(terms, less, kLogprob)) / (2 * kStep),
                kDifference)
        << i;
    EXPECT_EQ(entropy[i], 0) << i;
  }
  EXPECT_EQ(loss.needs_whole_rollout(), terms.kind == DatumLossKind::gspo);
  if (loss.needs_whole_rollout()) return;
  // Edge by edge, in any order, it is the same.
  DatumLoss apart(all);
  for (const std::int32_t i : {3, 0, 6, 1, 5, 2, 4}) {
    const LossEdge edge{0, 0, 0, i};
    double one = 7, other = 7;
    apart.add_edges({&edge, 1}, {&kLogprob[static_cast<std::size_t>(i)], 1}, {&one, 1}, {&one, 1}, {&other, 1});
    EXPECT_EQ(one, gradient[static_cast<std::size_t>(i)]);
  }
  EXPECT_NEAR(apart.loss(0), loss.loss(0), 1e-15);
}

constexpr DatumLossKind kKinds[] = {DatumLossKind::cross_entropy, DatumLossKind::importance_sampling,
                                    DatumLossKind::ppo,           DatumLossKind::cispo,
                                    DatumLossKind::dro,           DatumLossKind::gspo};

TEST(DatumLoss, EveryLossIsItsFormula) {
  for (const DatumLossKind kind : kKinds) {
    SCOPED_TRACE(static_cast<int>(kind));
    expect_formula(terms_of(kind));
  }
}

TEST(DatumLoss, BoundsMayDifferFromTargetToTarget) {
  for (const DatumLossKind kind : {DatumLossKind::ppo, DatumLossKind::cispo, DatumLossKind::gspo}) {
    SCOPED_TRACE(static_cast<int>(kind));
    DatumTerms terms = terms_of(kind);
    terms.ratio_low = {0.1, 0.95, 0.5, 0.3, 0.8, 0.2, 0.99}, terms.ratio_high = {0.5, 1.05, 1.01, 0.35, 1.2, 2.1, 1.5};
    expect_formula(terms);
  }
}

TEST(DatumLoss, ClippedTargetsAreCounted) {
  const std::vector<DatumTerms> terms{terms_of(DatumLossKind::ppo)};
  std::vector<double> gradient(kLogprob.size()), entropy(kLogprob.size());
  DatumLoss loss(terms);
  loss.add_rollout(0, kLogprob, kLogprob, gradient, entropy);
  // The ratio 2.2 with a positive advantage, and 0.41 with a negative one; 0.67 with a positive one is not clipped.
  EXPECT_EQ(loss.clipped(0), 2);
}

TEST(DatumLoss, AWeightOfZeroAddsNothingWhateverTheRatio) {
  std::vector<DatumTerms> terms{terms_of(DatumLossKind::importance_sampling)};
  terms[0].old_logprob[4] = -2000;  // its ratio has no number
  std::vector<double> gradient(kLogprob.size()), entropy(kLogprob.size());
  DatumLoss loss(terms);
  loss.add_rollout(0, kLogprob, kLogprob, gradient, entropy);
  EXPECT_TRUE(std::isfinite(loss.loss(0)));
  EXPECT_EQ(gradient[4], 0);
}

TEST(DatumLoss, DataHaveLossesOfTheirOwn) {
  const std::vector<DatumTerms> terms{terms_of(DatumLossKind::ppo), terms_of(DatumLossKind::dro)};
  std::vector<double> gradient(kLogprob.size()), entropy(kLogprob.size());
  DatumLoss loss(terms);
  for (const std::int32_t i : {1, 0}) loss.add_rollout(i, kLogprob, kLogprob, gradient, entropy);
  for (std::size_t i = 0; i < 2; ++i)
    EXPECT_NEAR(loss.loss(static_cast<std::int32_t>(i)), formula(terms[i], kLogprob, kLogprob), 1e-14);
}

}  // namespace
}  // namespace espalier
