// --train under every layout: what trains has the gradient of one process.
#include <gtest/gtest.h>

#include "tests/parallel/layouts.h"

namespace espalier::testing {
namespace {

const std::vector<Degrees> kDenseLayouts = {{.tp = 2},
                                            {.tp = 4},
                                            {.dp = 3},
                                            {.cp = 2},
                                            {.pp = 2},
                                            {.pp = 3},
                                            {.tp = 2, .dp = 2},
                                            {.cp = 2, .pp = 2},
                                            {.cp = 2, .pp = 3},
                                            {.tp = 2, .cp = 2, .pp = 2},
                                            {.dp = 3, .full = true},
                                            {.cp = 2, .dp = 2, .full = true},
                                            {.pp = 3, .dp = 2, .full = true},
                                            {.tp = 4, .dp = 2, .full = true}};
const std::vector<Degrees> kExpertLayouts = {{.tp = 2, .ep = 2},
                                             {.dp = 2, .ep = 2},
                                             {.pp = 2, .dp = 2, .ep = 2},
                                             {.cp = 2, .ep = 2},
                                             {.tp = 2, .dp = 2, .ep = 4, .full = true}};

void expect_layouts(Case c, const std::vector<const char*>& all_words, const std::vector<Degrees>& layouts) {
  for (const char* words : all_words) {
    c.options.train = words;
    for (const Plan& plan :
         {Plan{"", "phased", 7, "keep"}, {"", "phased", 7, "recompute"}, {"", "packed", 7, "auto"}}) {
      const Case planned = with(c, plan);
      const Outcome one = run_case(planned);
      for (const Degrees& degrees : layouts) {
        SCOPED_TRACE(text_of(text_of_degrees(degrees), ", ", words, ", ", plan.schedule, ", ", plan.trunk_state, ", ",
                             c.family));
        expect_as_one_process(planned, degrees, one);
      }
    }
  }
}

TEST(HeldParameterLayouts, GiveTheGradientOfOneProcess) {
  expect_layouts(ragged("qwen3-odd"),
                 {"norms", "embeddings", "attention", "model[.]layers[.][12][.].*", "model[.]norm[.]weight"},
                 kDenseLayouts);
  expect_layouts(ragged("llama-bias"), {".*bias", "model[.]layers[.]2[.].*"}, kDenseLayouts);
}

TEST(HeldParameterLayouts, OfExpertsToo) {
  expect_layouts(ragged("qwen3-moe"), {"norms", "router", "experts", "attention,model[.]layers[.]2[.].*"},
                 kExpertLayouts);
}

// The backward does not ask for layers without one, where the path is sharded over cp or offloaded.
TEST(HeldParameterLayouts, OfASleepingPathToo) {
  Case c = ragged("qwen3");
  c.rollouts.groups = 5, c.rollouts.shared_start = 0.7, c.rollouts.nested_prompt = 0.3;
  for (const char* state : {"divide", "offload"}) {
    c.options.path_state = state;
    expect_layouts(c, {"model[.]layers[.][12][.].*", "model[.]layers[.]2[.].*", "head"},
                   {{.cp = 2}, {.cp = 3}, {.cp = 2, .pp = 2}, {.cp = 2, .dp = 2, .full = true}});
  }
}

TEST(HeldParameterLayouts, OfACriticToo) {
  expect_layouts(as_critic(ragged("qwen3")), {"norms", "model[.]layers[.]2[.].*"},
                 {{.tp = 2}, {.cp = 2}, {.pp = 2}, {.pp = 3}, {.dp = 2, .full = true}});
}

}  // namespace
}  // namespace espalier::testing
