// Data parallel: whatever the number of ranks, the gradient, the loss, the log-probs and the counts of one process.
#include <ATen/core/Tensor.h>
#include <gtest/gtest.h>

#include <cmath>
#include <mutex>

#include "espalier/base/error.h"
#include "tests/equivalence/fixture.h"
#include "tests/support/in_process.h"

namespace espalier::testing {
namespace {

// The outcome of every rank, in rank order.
std::vector<Outcome> run_under(const Degrees& degrees, const Case& c, DType dtype = DType::float64) {
  std::vector<Outcome> outcomes(static_cast<std::size_t>(degrees.ranks()));
  run_ranks(degrees, [&](const Mesh& mesh) {
    outcomes[static_cast<std::size_t>(mesh.world.rank())] = run_case(c, dtype, mesh);
  });
  return outcomes;
}

void expect_same_number(double a, double b) {
  if (std::isnan(b))
    EXPECT_TRUE(std::isnan(a));
  else
    EXPECT_NEAR(a, b, kFloat64 * std::max(1.0, std::abs(b)));
}

void expect_same_series(const std::vector<double>& a, const std::vector<double>& b) {
  ASSERT_EQ(a.size(), b.size());
  for (std::size_t t = 0; t < a.size(); ++t) expect_same_number(a[t], b[t]);
}

void expect_as_alone(const Case& c, const Outcome& rank, const Outcome& alone) {
  const Worst worst = worst_parameter(c, rank.gradient, alone.gradient);
  EXPECT_LE(worst.error, kFloat64) << worst.parameter;
  expect_same_number(rank.loss, alone.loss);
  const LossParts &a = rank.report.loss, &b = alone.report.loss;
  for (const auto& [one, other] : {std::pair{a.pg_loss, b.pg_loss}, {a.kl_loss, b.kl_loss}, {a.entropy, b.entropy}})
    expect_same_number(one, other);
  expect_same_number(a.clip_fraction, b.clip_fraction);
  EXPECT_EQ(a.loss_tokens, b.loss_tokens);
  ASSERT_EQ(rank.report.series.size(), alone.report.series.size());
  for (std::size_t i = 0; i < alone.report.series.size(); ++i) {
    expect_same_series(rank.report.series[i].logprob, alone.report.series[i].logprob);
    expect_same_series(rank.report.series[i].entropy, alone.report.series[i].entropy);
  }
  ASSERT_EQ(rank.critic.values.size(), alone.critic.values.size());
  for (std::size_t i = 0; i < alone.critic.values.size(); ++i)
    expect_same_series(rank.critic.values[i], alone.critic.values[i]);
  expect_same_number(rank.report.router.aux_loss, alone.report.router.aux_loss);
  expect_same_number(rank.report.router.z_loss, alone.report.router.z_loss);
  EXPECT_EQ(rank.report.router.load, alone.report.router.load);
  EXPECT_EQ(rank.report.plan.logical_rows, alone.report.plan.logical_rows);
}

// 7 ranks are more than there are trees.
void expect_all_layouts(const Case& c, const std::vector<Plan>& plans) {
  for (const Plan& plan : plans) {
    const Case planned = with(c, plan);
    const Outcome alone = run_case(planned);
    for (const std::int64_t dp : {2, 3, 7}) {
      const std::vector<Outcome> ranks = run_under({.dp = dp}, planned);
      for (std::size_t rank = 0; rank < ranks.size(); ++rank) {
        SCOPED_TRACE(text_of(c.family, ", ", plan.name, ", dp ", dp, ", rank ", rank));
        expect_as_alone(planned, ranks[rank], alone);
        EXPECT_TRUE(ranks[rank].gradient.equal(ranks[0].gradient)) << "the same bits on all ranks";
      }
    }
  }
}

TEST(DataParallel, EveryPlanOfADenseModel) { expect_all_layouts(ragged("qwen3"), all_plans({0, 7})); }

TEST(DataParallel, UntiedHeadsAndBiases) {
  for (const char* family : {"llama", "llama-bias", "qwen2"})
    expect_all_layouts(ragged(family), {{"phased, budget 5", "phased", 5, "recompute"}, {"auto", "auto", 0, "auto"}});
}

TEST(DataParallel, ExpertsWithTheirLossesInBothScopes) {
  for (const char* scope : {"rollout", "minibatch"}) {
    Case c = ragged("qwen3-moe-sparse");
    c.options.router_aux_loss_coef = 0.3, c.options.router_z_loss_coef = 0.1;
    c.options.router_aux_loss_scope = scope;
    expect_all_layouts(c, all_plans({0, 7}));
  }
  expect_all_layouts(ragged("qwen3-moe"), {{"phased, budget 7", "phased", 7, "keep"}});  // loads alone
}

TEST(DataParallel, LossesOfWholeRolloutsAndEveryAggregation) {
  for (const char* mode : {"seq-mean-token-mean", "seq-mean-token-sum-norm", "token-mean"}) {
    Case c = ragged("qwen3");
    c.options.policy_loss = "gspo", c.options.loss_agg_mode = mode;
    c.options.entropy_coeff = 0.1;
    expect_all_layouts(c, {{"phased, budget 7", "phased", 7, "keep"}});
  }
}

TEST(DataParallel, ACriticsGradientAndValues) {
  Case c = ragged("qwen3");
  c.critic = c.rollouts.values = true;
  expect_all_layouts(c, {{"phased, budget 7", "phased", 7, "keep"}, {"packed", "packed", 0, "auto"}});
}

// Responses that begin alike fork below their prompt.
TEST(DataParallel, TreesOfDepthTwo) {
  Case c = ragged("qwen3");
  c.rollouts.groups = 8, c.rollouts.shared_start = 0.7;
  expect_all_layouts(c, {{"phased, budget 6", "phased", 6, "keep"}, {"phased, budget 6", "phased", 6, "recompute"}});
}

// One tree for all ranks: each runs what is above its part.
TEST(DataParallel, OneTreeOfAnAgentsTurnsIsCut) {
  Case c = ragged("qwen3");
  c.rollouts.groups = 1, c.rollouts.group_size = {24, 24};
  c.rollouts.prompt_length = {12, 12}, c.rollouts.response_length = {20, 30};
  c.rollouts.shared_start = 0.4, c.rollouts.continues = 0.4;
  c.rollouts.one_token_prompt = 0;
  for (const std::uint64_t seed : {1, 2, 3}) {
    c.seed = seed;
    const std::vector<Plan> plans = {{"phased, budget 60", "phased", 60, "keep"}, {"auto", "auto", 0, "auto"}};
    expect_all_layouts(c, plans);
    const Outcome alone = run_case(with(c, plans[0]));
    for (const std::int64_t dp : {2, 4}) {
      const Outcome rank = run_under({.dp = dp}, with(c, plans[0])).front();
      EXPECT_GT(rank.report.trunk_rows + rank.report.wave_rows, alone.report.trunk_rows + alone.report.wave_rows)
          << "ranks repeat what is above their parts";
    }
  }
}

TEST(DataParallel, NoPromptIsComputedOnTwoRanks) {
  Case c;
  c.rollouts.groups = 5, c.rollouts.group_size = {4, 4}, c.rollouts.prompt_length = {9, 30};
  c.options.share = "prompt", c.options.schedule = "phased", c.options.token_budget = 32;
  const Outcome alone = run_case(c);
  EXPECT_EQ(alone.report.trunk_forwards, 5);
  for (const std::int64_t dp : {2, 4, 5}) {
    const Outcome rank = run_under({.dp = dp}, c).front();
    EXPECT_EQ(rank.report.trunk_forwards, alone.report.trunk_forwards) << "summed over ranks";
    EXPECT_EQ(rank.report.trunk_rows, alone.report.trunk_rows);
  }
}

// Exactly what docs/parallel.md says: gradients once, and two numbers a response token.
TEST(DataParallel, BytesAreThoseOfTheGradientAndTheSeries) {
  Case c = ragged("qwen3");
  const Outcome alone = run_case(c);
  std::int64_t tokens = 0;
  for (const RolloutSeries& series : alone.report.series) tokens += static_cast<std::int64_t>(series.logprob.size());
  run_ranks({.dp = 2}, [&](const Mesh& mesh) {
    const Outcome rank = run_case(c, DType::float64, mesh);
    const std::int64_t gradient = rank.gradient.numel() * 8, series = 2 * tokens * 8;
    const std::int64_t control = mesh.bytes().dp + mesh.world.bytes() - gradient - series;
    EXPECT_GE(control, 0);
    EXPECT_LT(control, 1000) << "fingerprints, counts and sums of losses";
  });
}

TEST(DataParallel, Float32StaysWithinTheErrorOfOneProcess) {
  Case c = ragged("qwen3");
  const Outcome exact = run_case(c);
  const double alone = worst_parameter(c, run_case(c, DType::float32).gradient, exact.gradient).error;
  for (const std::int64_t dp : {2, 3}) {
    const Outcome rank = run_under({.dp = dp}, c, DType::float32).front();
    EXPECT_LE(worst_parameter(c, rank.gradient, exact.gradient).error, 2 * alone) << dp;  // the ladder's factor
  }
}

TEST(DataParallel, RanksWithOtherRolloutsAreTold) {
  const Case c = ragged("qwen3");
  const auto body = [&](const Mesh& mesh) {
    Case own = c;
    if (mesh.world.rank() == 1) own.rollouts.groups = 4;
    run_case(own, DType::float64, mesh);
  };
  EXPECT_THROW(run_ranks({.dp = 2}, body, {.timeout = 5}), CommunicationError);
}

}  // namespace
}  // namespace espalier::testing
