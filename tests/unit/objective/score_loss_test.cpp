// The loss of a reward model's sets against its definition, and its derivative against differences of the loss.
#include "espalier/objective/score_loss.h"

#include <gtest/gtest.h>

#include <cmath>

#include "espalier/base/error.h"

namespace espalier {
namespace {

void add_answer(std::vector<Rollout>& out, std::int64_t set, const PairPlace& place) {
  Rollout& answer = out.emplace_back();
  answer.prompt_ids = {1};
  answer.response_ids = {2, 3};
  answer.loss_mask = {1, 1};
  answer.pair = place;
  answer.pair.pair = set;
}

std::vector<Rollout> scored_pair(double margin) {
  std::vector<Rollout> out;
  add_answer(out, 0, {.chosen = true, .ref_logprob = {}, .score = {}, .margin = margin});
  add_answer(out, 0, {.ref_logprob = {}, .score = {}, .margin = margin});
  return out;
}

std::vector<Rollout> list_of(const std::vector<double>& scores, std::int64_t set = 0) {
  std::vector<Rollout> out;
  for (const double score : scores) add_answer(out, set, {.ref_logprob = {}, .score = score});
  return out;
}

double loss_of(const std::vector<Rollout>& rollouts, const std::vector<double>& scores, double center = 0) {
  Options options;
  options.center_rewards_coefficient = center;
  return score_loss(rollouts, scores, options).means.loss;
}

TEST(ScoreLoss, OfAPairIsThatOfBradleyAndTerry) {
  const double r = 0.7, s = -0.4, m = 0.3, c = 0.05;
  EXPECT_NEAR(loss_of(scored_pair(m), {r, s}, c), std::log1p(std::exp(-(r - s - m))) + c * (r + s) * (r + s), 1e-15);
}

TEST(ScoreLoss, OfAListIsTheProbabilityOfItsOrder) {
  const double a = 0.3, b = 1.2, c = -0.5;
  const double order =
      std::exp(b) / (std::exp(a) + std::exp(b) + std::exp(c)) * std::exp(c) / (std::exp(a) + std::exp(c));
  EXPECT_NEAR(loss_of(list_of({1, 3, 2}), {a, b, c}), -std::log(order), 1e-15);
}

TEST(ScoreLoss, ComparesNoEqualScores) {
  const double a = 0.3, b = 1.2, c = -0.5;
  const double ahead = std::exp(a) / (std::exp(a) + std::exp(c)) * std::exp(b) / (std::exp(b) + std::exp(c));
  EXPECT_NEAR(loss_of(list_of({1, 1, 0}), {a, b, c}), -std::log(ahead), 1e-15);
  EXPECT_EQ(loss_of(list_of({1, 1, 1}), {a, b, c}), 0);
}

TEST(ScoreLoss, HasTheDerivativeOfDifferences) {
  std::vector<Rollout> rollouts = scored_pair(0.4);
  for (const std::vector<double>& scores : {std::vector<double>{3, 1, 2, 1}, {1, 1, 1}})
    for (const Rollout& answer : list_of(scores, rollouts.back().pair.pair + 1)) rollouts.push_back(answer);
  const std::vector<double> at = {0.3, -0.2, 1.4, 0.1, 2, -1, 0.5, 0.6, -3};
  constexpr double h = 1e-5;
  Options options;
  options.center_rewards_coefficient = 0.1;
  const ScoreLoss loss = score_loss(rollouts, at, options);
  for (std::size_t i = 0; i < at.size(); ++i) {
    std::vector<double> more = at, less = at;
    more[i] += h, less[i] -= h;
    // The error of a central difference: h^2 of the third derivative, and rounding of the loss over h.
    const double difference = (loss_of(rollouts, more, 0.1) - loss_of(rollouts, less, 0.1)) / (2 * h);
    EXPECT_NEAR(loss.slope[i], difference, 1e-9 + 0x1p-50 * loss.means.loss / h) << i;
  }
}

TEST(ScoreLoss, StaysFiniteFarOut) {
  for (const double far : {-1e4, 1e4}) {
    Options options;
    const ScoreLoss loss = score_loss(scored_pair(0), std::vector<double>{far, 0}, options);
    EXPECT_NEAR(loss.means.loss, far < 0 ? 1e4 : 0, 1e-9);
    EXPECT_NEAR(loss.slope[0], far < 0 ? -1 : 0, 1e-12);
  }
}

TEST(ScoreLoss, MeansAreThoseOfSetsThatRank) {
  std::vector<Rollout> rollouts = scored_pair(0);
  for (const Rollout& answer : list_of({1, 1}, 1)) rollouts.push_back(answer);
  const ScoreMeans means = score_loss(rollouts, std::vector<double>{2, 1, 5, -3}, Options()).means;
  EXPECT_EQ(means.accuracy, 1);
  EXPECT_EQ(means.margin, 1);
  EXPECT_EQ(means.least, -3);
  EXPECT_EQ(means.most, 5);
  EXPECT_EQ(means.mean, 1.25);
}

TEST(ScoreLoss, RefusesAResponseOfNoSet) {
  std::vector<Rollout> rollouts = scored_pair(0);
  rollouts[0].pair = {};
  EXPECT_THROW(loss_of(rollouts, {1, 2}), InputError);
}

}  // namespace
}  // namespace espalier
