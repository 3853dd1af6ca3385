// Counts with multiplicity, by hand: two rollouts that share two tokens and have one and two of their own.
#include "espalier/model/load_accounting.h"

#include <gtest/gtest.h>

#include <array>

#include "espalier/base/error.h"

namespace espalier::moe {
namespace {

// Three experts, one a token. Rows: 0, 1 shared; 2 of rollout 0; 3, 4 of rollout 1.
const RouterShape kShape{0, 3, 1, true};
const std::array<std::int32_t, 2> kBoth{0, 1};
const std::array<std::int32_t, 5> kChoice{0, 1, 1, 2, 1};

std::vector<RowOwners> shared_rows() { return {{0, 2, kBoth}}; }
std::vector<RowOwners> own_rows() {
  return {{0, 1, std::span(kBoth).subspan(0, 1)}, {1, 3, std::span(kBoth).subspan(1, 1)}};
}
std::vector<RowOwners> all_rows() {
  return {{0, 2, kBoth}, {2, 3, std::span(kBoth).subspan(0, 1)}, {3, 5, std::span(kBoth).subspan(1, 1)}};
}

TEST(LoadAccounting, CountsASharedTokenOncePerRollout) {
  LoadAccounting accounting(2, kShape, {3, 4}, {0.1, 0, AuxScope::rollout});
  accounting.add_choices(1, shared_rows(), kChoice.data());
  accounting.add_choices(1, own_rows(), kChoice.data() + 2);
  const auto load = accounting.load(1);
  EXPECT_EQ(std::vector<std::int64_t>(load.begin(), load.end()), (std::vector<std::int64_t>{2, 4, 1}));
  for (const std::int64_t count : accounting.load(0)) EXPECT_EQ(count, 0);
}

TEST(LoadAccounting, ScopeRolloutSumsTheSharesOfARowsRollouts) {
  LoadAccounting accounting(1, kShape, {3, 4}, {0.1, 0, AuxScope::rollout});
  accounting.add_choices(0, all_rows(), kChoice.data());
  const auto penalty = accounting.penalty(0, all_rows());
  EXPECT_EQ(penalty.group_R, (std::vector<std::int32_t>{0, 0, 1, 2, 2}));
  // coef E / N = 0.15; f of rollout 0: 1/3, 2/3, 0 over 3 tokens; of rollout 1: 1/4, 2/4, 1/4 over 4.
  const double first[] = {0.15 / 9, 0.15 * 2 / 9, 0}, second[] = {0.15 / 16, 0.15 * 2 / 16, 0.15 / 16};
  for (std::size_t e = 0; e < 3; ++e) {
    EXPECT_NEAR(penalty.probability_GE[e], first[e] + second[e], 1e-16);
    EXPECT_NEAR(penalty.probability_GE[3 + e], first[e], 1e-16);
    EXPECT_NEAR(penalty.probability_GE[6 + e], second[e], 1e-16);
  }
  EXPECT_TRUE(penalty.z_G.empty());
}

TEST(LoadAccounting, ScopeMinibatchWeighsByMultiplicity) {
  LoadAccounting accounting(1, kShape, {3, 4}, {0.1, 0.7, AuxScope::minibatch});
  EXPECT_TRUE(accounting.needs_counts_first());
  accounting.add_choices(0, all_rows(), kChoice.data());
  accounting.finish_counting();
  accounting.add_choices(0, all_rows(), kChoice.data());  // the second forward is not counted
  const auto penalty = accounting.penalty(0, all_rows());
  const double share[] = {2.0 / 7, 4.0 / 7, 1.0 / 7};
  for (std::size_t e = 0; e < 3; ++e) {
    EXPECT_NEAR(penalty.probability_GE[e], 0.3 * 2 * share[e] / 7, 1e-16);
    EXPECT_NEAR(penalty.probability_GE[3 + e], 0.3 * share[e] / 7, 1e-16);
  }
  EXPECT_NEAR(penalty.z_G[0], 0.7 * 2 / 7, 1e-16);
  EXPECT_NEAR(penalty.z_G[2], 0.7 / 7, 1e-16);
}

TEST(LoadAccounting, ScopeRolloutIsAMeanOfTheRolloutsMeans) {
  const LoadAccounting accounting(1, kShape, {3, 4}, {0, 0.6, AuxScope::rollout});
  EXPECT_FALSE(accounting.needs_counts_first());
  const auto penalty = accounting.penalty(0, all_rows());
  EXPECT_NEAR(penalty.z_G[0], 0.6 / 2 * (1.0 / 3 + 1.0 / 4), 1e-16);  // shared rows
  EXPECT_NEAR(penalty.z_G[1], 0.6 / 2 / 3, 1e-16);                    // of rollout 0
  EXPECT_NEAR(penalty.z_G[2], 0.6 / 2 / 4, 1e-16);                    // of rollout 1
  EXPECT_TRUE(penalty.probability_GE.empty());
}

TEST(LoadAccounting, RefusesABackwardBeforeARolloutIsCounted) {
  LoadAccounting accounting(1, kShape, {3, 4}, {0.1, 0, AuxScope::rollout});
  accounting.add_choices(0, shared_rows(), kChoice.data());
  EXPECT_THROW(accounting.penalty(0, shared_rows()), InternalError);
}

TEST(LoadAccounting, ReportsLossesBeforeTheirCoefficients) {
  LoadAccounting accounting(1, kShape, {3, 4}, {0.5, 0.25, AuxScope::rollout});
  accounting.add({2, 3});
  EXPECT_EQ(accounting.aux_loss(), 4);
  EXPECT_EQ(accounting.z_loss(), 12);
  EXPECT_EQ(accounting.weighted_loss(), 5);
}

TEST(LoadAccounting, CountsOfAScorePassServeTheMiniBatchesOfIts) {
  LoadAccounting scored(1, kShape, {3, 4}, {}, true);
  EXPECT_TRUE(scored.all_rows_choose());
  EXPECT_FALSE(scored.has_losses());
  scored.add_choices(0, all_rows(), kChoice.data());
  LoadAccounting second(1, kShape, {4}, {0.1, 0, AuxScope::minibatch});
  const std::int64_t place[] = {1};
  second.take_counts(scored, place);
  second.add_choices(0, own_rows(), kChoice.data());  // the update's own forward is not counted
  const auto load = second.load(0);
  EXPECT_EQ(std::vector<std::int64_t>(load.begin(), load.end()), (std::vector<std::int64_t>{1, 2, 1}));
  LoadAccounting other(1, kShape, {5}, {0.1, 0, AuxScope::minibatch});
  EXPECT_THROW(other.take_counts(scored, place), InternalError);
}

TEST(LoadAccounting, WithoutALossOnlyRowsThatPredictRunALastLayer) {
  const LoadAccounting accounting(1, kShape, {3, 4}, {});
  EXPECT_FALSE(accounting.all_rows_choose());
  EXPECT_FALSE(accounting.needs_counts_first());
}

}  // namespace
}  // namespace espalier::moe
