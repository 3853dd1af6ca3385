// A path whose layers are stored away or divided over ranks (--path-state) where ranks divide rows, layers, heads or
// weights.
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "tests/parallel/layouts.h"

namespace espalier::testing {
namespace {

// Trunks below trunks: what is above has gradients already when a trunk below is opened.
Case sleeping(const std::string& family, const Plan& plan, const std::string& state) {
  Case c = with(ragged(family), plan);
  c.rollouts.groups = 5, c.rollouts.shared_start = 0.7, c.rollouts.nested_prompt = 0.3;
  c.options.path_state = state;
  return c;
}

const std::vector<Plan> kPlans = {{"keep", "phased", 6, "keep"},
                                  {"offload", "phased", 6, "offload"},
                                  {"chains, recompute", "phased", 3, "recompute"}};

void expect_as_awake(const Case& c, const std::vector<Degrees>& layouts) {
  Case awake = c;
  awake.options.path_state = "keep";
  const Outcome one = run_case(awake);
  for (const Degrees& degrees : layouts) {
    SCOPED_TRACE(text_of(text_of_degrees(degrees), ", ", c.family, c.critic ? ", critic, path " : ", path ",
                         name_of(c.options.path_state)));
    expect_as_one_process(c, degrees, one);
    EXPECT_EQ(run_layout(c, degrees).ranks.front().report.plan.path.state(), c.options.path_state);
  }
}

TEST(SleepingPathOnRanks, GivesTheGradientOfOneProcessAwake) {
  for (const Plan& plan : kPlans)
    expect_as_awake(sleeping("qwen3", plan, "offload"), {{.cp = 2},
                                                         {.cp = 3},
                                                         {.pp = 2},
                                                         {.pp = 3},
                                                         {.cp = 2, .pp = 2},
                                                         {.tp = 2, .cp = 2},
                                                         {.pp = 2, .dp = 2},
                                                         {.dp = 2, .full = true},
                                                         {.cp = 2, .dp = 2, .full = true}});
}

TEST(SleepingPathOnRanks, WithExpertsToo) {
  for (const Plan& plan : kPlans)
    expect_as_awake(sleeping("qwen3-moe", plan, "offload"),
                    {{.cp = 2, .ep = 2}, {.pp = 2, .dp = 2, .ep = 2}, {.cp = 2, .pp = 2, .ep = 2}});
}

// Ranks without a wave of their own join those of the others of their cp.
TEST(DividedPath, GivesTheGradientOfOneProcess) {
  for (const Plan& plan : kPlans)
    expect_as_awake(sleeping("qwen3", plan, "divide"), {{.cp = 2},
                                                        {.cp = 3},
                                                        {.cp = 4},
                                                        {.tp = 2, .cp = 2},
                                                        {.cp = 2, .pp = 2},
                                                        {.cp = 2, .pp = 3},
                                                        {.cp = 2, .dp = 2},
                                                        {.cp = 2, .full = true},
                                                        {.cp = 2, .dp = 2, .full = true}});
}

TEST(DividedPath, WithExpertsToo) {
  for (const Plan& plan : kPlans)
    expect_as_awake(sleeping("qwen3-moe", plan, "divide"), {{.cp = 2},
                                                            {.cp = 2, .ep = 2},
                                                            {.cp = 4, .ep = 2},
                                                            {.cp = 2, .dp = 2, .ep = 4},
                                                            {.cp = 2, .pp = 2, .ep = 2},
                                                            {.cp = 2, .dp = 2, .ep = 2, .full = true}});
}

TEST(DividedPath, OfACriticAndOfLossesOfWholeRollouts) {
  expect_as_awake(as_critic(sleeping("qwen3", kPlans[0], "divide")), {{.cp = 3}, {.cp = 2, .pp = 2}});
  Case c = sleeping("qwen3", kPlans[2], "divide");
  c.options.policy_loss = "gspo", c.options.entropy_coeff = 0.1;
  expect_as_awake(c, {{.cp = 3}, {.cp = 2, .pp = 2}, {.cp = 2, .dp = 2, .full = true}});
}

}  // namespace
}  // namespace espalier::testing
