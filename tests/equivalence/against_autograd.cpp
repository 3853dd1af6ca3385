#include "tests/equivalence/against_autograd.h"

#include <gtest/gtest.h>

#include <cmath>

#include "espalier/data/training_data.h"
#include "espalier/program/step_plan.h"

namespace espalier::testing {
namespace {

void expect_series_near(const Outcome& run, const OracleResult& expected) {
  for (std::size_t i = 0; i < expected.logprobs.size(); ++i) {
    const RolloutSeries& series = run.report.series[i];
    ASSERT_EQ(series.logprob.size(), expected.logprobs[i].size());
    for (std::size_t t = 0; t < series.logprob.size(); ++t) {
      // A log-prob is a sum of O(M) rounded terms of size O(10): 1e-11 is 1e4 units in the last place of 10.
      ASSERT_NEAR(series.logprob[t], expected.logprobs[i][t], 1e-11) << "rollout " << i << ", token " << t;
      ASSERT_NEAR(series.entropy[t], expected.entropies[i][t], 1e-11) << "rollout " << i << ", token " << t;
    }
  }
  for (std::size_t i = 0; i < expected.values.size(); ++i) {
    ASSERT_EQ(run.critic.values[i].size(), expected.values[i].size());
    for (std::size_t t = 0; t < expected.values[i].size(); ++t)
      ASSERT_NEAR(run.critic.values[i][t], expected.values[i][t], 1e-11) << "rollout " << i << ", token " << t;
  }
}

}  // namespace

void expect_as_autograd(const Case& c, const OracleResult& expected) {
  const Outcome run = run_case(c);
  validate(run.report.plan, TrainingData(make_rollouts(c.rollouts, c.seed), c.options).mini_batch(0).rollouts);
  const Worst worst = worst_parameter(c, run.gradient, expected.gradient);
  EXPECT_LE(worst.error, kFloat64) << worst.parameter;
  EXPECT_NEAR(run.loss, expected.loss, kFloat64 * std::max(1.0, std::abs(expected.loss)));
  expect_series_near(run, expected);
}

void expect_all_plans(const Case& c, const std::vector<std::int64_t>& budgets) {
  const OracleResult expected = run_oracle(c);
  for (const Plan& plan : all_plans(budgets)) {
    SCOPED_TRACE(plan.name + ", " + c.family +
                 (c.critic ? ", critic" : std::string(", ") + name_of(c.options.policy_loss)) + ", seed " +
                 std::to_string(c.seed));
    expect_as_autograd(with(c, plan), expected);
  }
}

Case as_critic(Case c) {
  c.critic = c.rollouts.values = true;
  c.options.gamma = 0.9, c.options.lam = 0.8;
  c.edit = [](std::vector<Rollout>& rollouts, const ModelState&) {
    for (std::size_t i = 0; i < rollouts.size(); i += 2) rollouts[i].returns.clear();
  };
  return c;
}

}  // namespace espalier::testing
