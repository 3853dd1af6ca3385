// Adapters under every layout have the gradient of one process: of the matrix that all ranks of tp hold each computes a
// part.
#include <gtest/gtest.h>

#include "tests/parallel/layouts.h"

namespace espalier::testing {
namespace {

void expect_layouts_of_targets(Case c, const std::vector<const char*>& targets, const std::vector<Degrees>& layouts) {
  c.options.lora_rank = 3, c.options.lora_alpha = 7;
  for (const char* target : targets) {
    c.options.lora_target = target;
    for (const Plan& plan : {Plan{"", "phased", 7, "keep"}, {"", "packed", 7, "auto"}}) {
      const Case planned = with(c, plan);
      const Outcome one = run_case(planned);
      for (const Degrees& degrees : layouts) {
        SCOPED_TRACE(text_of(text_of_degrees(degrees), ", ", target, ", ", plan.schedule, ", ", c.family));
        expect_as_one_process(planned, degrees, one);
      }
    }
  }
}

TEST(AdapterLayouts, GiveTheGradientOfOneProcess) {
  const std::vector<Degrees> layouts = {{.tp = 2},
                                        {.tp = 4},
                                        {.dp = 3},
                                        {.cp = 2},
                                        {.pp = 2},
                                        {.pp = 3},
                                        {.tp = 2, .dp = 2},
                                        {.tp = 2, .cp = 2, .pp = 2},
                                        {.dp = 3, .full = true},
                                        {.pp = 3, .dp = 2, .full = true},
                                        {.tp = 4, .dp = 2, .full = true}};
  expect_layouts_of_targets(ragged("qwen3-odd"), {"all-linear", "q_proj,v_proj", "model[.]layers[.]1[.].*_proj"},
                            layouts);
  expect_layouts_of_targets(ragged("qwen3-odd"), {"all-linear"},
                            {{.cp = 3},
                             {.cp = 2, .dp = 2},
                             {.cp = 2, .pp = 2},
                             {.pp = 2, .dp = 2},
                             {.tp = 2, .pp = 2},
                             {.tp = 2, .cp = 2, .dp = 2},
                             {.tp = 2, .pp = 2, .dp = 2},
                             {.cp = 2, .dp = 2, .full = true},
                             {.tp = 2, .cp = 2, .full = true}});
  Case c = ragged("llama-bias");
  c.options.train = "norms";
  expect_layouts_of_targets(c, {"k_proj,down_proj"}, layouts);
}

TEST(AdapterLayouts, OfModelsWithExpertsToo) {
  expect_layouts_of_targets(ragged("qwen3-moe"), {"all-linear", "experts,gate,lm_head"},
                            {{.tp = 2},
                             {.cp = 2},
                             {.tp = 2, .ep = 2},
                             {.tp = 2, .cp = 2, .ep = 2},
                             {.cp = 2, .dp = 2, .ep = 2, .full = true},
                             {.dp = 2, .ep = 2},
                             {.pp = 2, .dp = 2, .ep = 2},
                             {.tp = 2, .dp = 2, .ep = 4, .full = true}});
}

TEST(AdapterLayouts, OfSharedExpertsLatentsStatesAndJointModulesToo) {
  const std::vector<Degrees> layouts = {{.tp = 2}, {.cp = 2}, {.pp = 2, .dp = 2}, {.tp = 2, .dp = 2, .full = true}};
  expect_layouts_of_targets(ragged("Qwen2Moe"), {"all-linear,experts,gate,lm_head"}, layouts);
  expect_layouts_of_targets(ragged("DeepseekV3"), {"all-linear,experts,lm_head"}, layouts);
  expect_layouts_of_targets(ragged("Phi3"), {"all-linear,lm_head"}, layouts);
  expect_layouts_of_targets(
      ragged("Qwen3Next"), {"all-linear,experts"},
      {{.tp = 2}, {.pp = 2, .dp = 2}, {.tp = 2, .dp = 2, .full = true}});  // no cp: some layers are recurrent
}

TEST(AdapterLayouts, OfAHeadThatIsTheEmbeddingToo) {
  expect_layouts_of_targets(
      ragged("llama-bias"), {"lm_head", "lm_head,q_proj"},
      {{.tp = 2}, {.cp = 2}, {.pp = 2}, {.dp = 2}, {.tp = 2, .cp = 2}, {.tp = 2, .pp = 2, .dp = 2}});
}

}  // namespace
}  // namespace espalier::testing
