// A path that sleeps (--path-state offload) on ranks that divide rows, layers, heads or weights.
#include <gtest/gtest.h>

#include <vector>

#include "tests/parallel/layouts.h"

namespace espalier::testing {
namespace {

// Trunks below trunks: what is above has gradients already when a trunk below is opened.
Case sleeping(const std::string& family, const Plan& plan) {
  Case c = with(ragged(family), plan);
  c.rollouts.groups = 5, c.rollouts.shared_start = 0.7, c.rollouts.nested_prompt = 0.3;
  c.options.path_state = "offload";
  return c;
}

void expect_as_awake(const std::string& family, const std::vector<Degrees>& layouts) {
  for (const Plan& plan : {Plan{"keep", "phased", 6, "keep"}, Plan{"offload", "phased", 6, "offload"},
                           Plan{"chains, recompute", "phased", 3, "recompute"}}) {
    const Case c = sleeping(family, plan);
    Case awake = c;
    awake.options.path_state = "keep";
    const Outcome one = run_case(awake);
    for (const Degrees& degrees : layouts) {
      SCOPED_TRACE(text_of(text_of_degrees(degrees), ", ", plan.name, ", ", family));
      expect_as_one_process(c, degrees, one);
      EXPECT_EQ(run_layout(c, degrees).ranks.front().report.plan.path_layers_awake, 0) << "it sleeps";
    }
  }
}

TEST(SleepingPathOnRanks, GivesTheGradientOfOneProcessAwake) {
  expect_as_awake("qwen3", {{.cp = 2},
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
  expect_as_awake("qwen3-moe", {{.cp = 2, .ep = 2}, {.pp = 2, .dp = 2, .ep = 2}, {.cp = 2, .pp = 2, .ep = 2}});
}

}  // namespace
}  // namespace espalier::testing
