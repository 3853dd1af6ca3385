// What ran, counted: the prompt once, every contribution, and the bytes that were predicted.
#include <gtest/gtest.h>

#include "tests/equivalence/fixture.h"

namespace espalier::testing {
namespace {

Case one_group(std::int64_t prompt, std::int64_t response, std::int64_t n) {
  Case c;
  c.rollouts.groups = 1;
  c.rollouts.group_size = {n, n};
  c.rollouts.prompt_length = {prompt, prompt};
  c.rollouts.response_length = {response, response};
  c.options.share = "prompt";
  return c;
}

TEST(Counters, ThePromptIsForwardedOnceForAnyNumberOfWaves) {
  const std::int64_t prompt = 30, response = 6, n = 8;
  for (const auto& [waves, critic] : {std::pair<std::int64_t, bool>(1, false), {2, false}, {4, true}, {8, false}}) {
    Case c = one_group(prompt, response, n);
    c.critic = c.rollouts.values = critic;
    c.options.schedule = "phased";
    c.options.token_budget = std::max<std::int64_t>(prompt, 1 + response * n / waves);
    if (waves == 8) c.options.token_budget = 1 + response;
    const Outcome run = run_case(c);
    const GradientReport& r = run.report;
    EXPECT_EQ(r.plan.logical_rows, n * (prompt + response));
    // The trunk leaves its last token to the waves, each of which starts with it.
    EXPECT_EQ(r.trunk_rows, prompt - 1);
    EXPECT_EQ(r.wave_rows, n * response + r.plan.waves);
    EXPECT_EQ(r.trunk_rows + r.wave_rows, r.plan.physical_rows());
  }
}

TEST(Counters, DenseForwardsEveryRowOfEveryRollout) {
  Case c = one_group(30, 6, 8);
  c.options.schedule = "dense";
  const Outcome run = run_case(c);
  EXPECT_EQ(run.report.wave_rows, 8 * 36);
  EXPECT_EQ(run.report.trunk_rows, 0);
  EXPECT_EQ(run.report.trunk_forwards, 0);
}

// Every moment belongs to one part, and the rest is small beside them.
TEST(Counters, AProfileAddsUpToTheStep) {
  Case c = one_group(30, 6, 8);
  c.options.profile = true;
  for (const Plan& plan : all_plans({0, 9})) {
    const GradientReport report = run_case(with(c, plan)).report;
    ASSERT_TRUE(report.profile.has_value());
    double sum = 0;
    for (const auto& [name, seconds] : report.profile->seconds) {
      EXPECT_GE(seconds, 0) << name;
      sum += seconds;
    }
    EXPECT_NEAR(sum, report.seconds.total, 1e-12);  // rounding of a handful of additions
    EXPECT_GT(report.profile->product_flops_per_second, 0);
  }
  c.options.profile = false;
  EXPECT_FALSE(run_case(c).report.profile.has_value());
}

// Two runs of the same step give the same bits, whatever the plan.
TEST(Counters, TheSameStepGivesTheSameBits) {
  for (const Plan& plan : all_plans({0, 9})) {
    Case c = with(one_group(20, 7, 5), plan);
    for (const DType dtype : {DType::float32, DType::float64})
      EXPECT_TRUE(run_case(c, dtype).gradient.equal(run_case(c, dtype).gradient)) << plan.name;
  }
}

}  // namespace
}  // namespace espalier::testing
