// Heads, inner columns, vocabulary and experts sharded over tp: the gradient of one process, put together whole.
#include <ATen/core/Tensor.h>
#include <gtest/gtest.h>

#include "espalier/base/error.h"
#include "tests/parallel/layouts.h"

namespace espalier::testing {
namespace {

const std::vector<Degrees> kLayouts = {{.tp = 2}, {.tp = 4}};

class TensorParallel : public ::testing::TestWithParam<const char*> {};

// Vocabulary 50 is not divisible by 4; llama-bias has one key/value head, most others two.
TEST_P(TensorParallel, EveryPlanGivesTheGradientOfOneProcess) {
  Case c;
  c.family = GetParam();
  c.rollouts = ragged_rollouts();
  for (c.seed = 1; c.seed <= 2; ++c.seed) expect_all_plans(c, {0, 7}, kLayouts);
}

TEST_P(TensorParallel, ACriticToo) {
  Case c;
  c.family = GetParam();
  c.rollouts = ragged_rollouts();
  expect_all_plans(as_critic(c), {0, 7}, kLayouts);
}
INSTANTIATE_TEST_SUITE_P(Models, TensorParallel,
                         ::testing::Values("llama", "llama-bias", "llama-bias-odd", "qwen2", "qwen3", "qwen3-odd",
                                           "qwen3-window-sinks", "qwen3-moe", "qwen3-moe-odd", "qwen3-moe-sparse",
                                           "qwen3-moe-late", "DeepseekV2", "DeepseekV3", "Gemma4", "SarvamMoE"),
                         [](const auto& info) { return name_of_family(info.param); });

// Key heads with their value heads and channels of the convolution; queries, keys and values are parts of one matrix.
TEST(TensorParallelStates, EveryPlanGivesTheGradientOfOneProcess) {
  for (const char* family : {"qwen3-next", "qwen3-next-plain", "qwen3-next-last", "qwen3-next-moe", "Bamba",
                             "GraniteMoeHybrid", "NemotronH", "Lfm2"}) {
    const Case c = ragged(family);
    expect_all_plans(c, {0, 7}, {{.tp = 2}});
    expect_all_plans(c, {7}, {{.tp = 2, .pp = 2}, {.tp = 2, .dp = 2}});
  }
  expect_all_plans(as_critic(ragged("qwen3-next-plain")), {7}, {{.tp = 2}});
}

TEST(TensorParallelStates, AreRefusedWhereChannelsDoNotDivide) {
  try {
    const LocalShape local(tiny_shape("Lfm2"), {.tp = 5}, Place{});
    FAIL() << "5 ranks share 24 channels";
  } catch (const OptionError& error) {
    EXPECT_NE(std::string(error.what()).find("a divisor of the 24 channels"), std::string::npos) << error.what();
  }
}

TEST(TensorParallelStates, AreRefusedWhereHeadsDoNotDivide) {
  const ModelShape shape = tiny_shape("qwen3-next");
  try {
    const LocalShape local(shape, {.tp = 4}, Place{});
    FAIL() << "4 ranks share 2 key heads";
  } catch (const OptionError& error) {
    EXPECT_NE(std::string(error.what()).find("a divisor of the 2 key heads"), std::string::npos) << error.what();
  }
}

struct Loss {
  const char *policy_loss, *rollout_is;
  double kl, entropy;
};

// Several temperatures, log-probs of other policies, derivatives that need whole rollouts.
TEST(TensorParallelLosses, EveryPlanGivesTheGradientOfOneProcess) {
  for (const Loss& loss : {Loss{"vanilla", "token", 0.1, 0.01}, Loss{"gspo", "none", 0.05, 0.02},
                           Loss{"reinforce", "sequence", 0, 0.01}}) {
    Case c;
    c.options.policy_loss = loss.policy_loss, c.options.rollout_is = loss.rollout_is;
    c.options.kl_loss_coef = loss.kl, c.options.entropy_coeff = loss.entropy;
    c.rollouts = ragged_rollouts();
    c.rollouts.temperature_low = 0.7, c.rollouts.temperature_high = 1.3;
    c.seed = 11;
    expect_all_plans(c, {0, 9}, kLayouts);
  }
}

TEST(TensorParallelRouters, LossesAndLoadsAreThoseOfOneProcess) {
  for (const char* scope : {"rollout", "minibatch"}) {
    Case c;
    c.family = "qwen3-moe-odd";
    c.options.router_aux_loss_coef = 0.5, c.options.router_z_loss_coef = 0.1;
    c.options.router_aux_loss_scope = scope;
    c.rollouts = ragged_rollouts();
    expect_all_plans(c, {0, 7}, {{.tp = 2}});
  }
}

TEST(TensorParallelPad, LookUpsOfAPadTokenHaveNoGradient) {
  for (const char* family : {"qwen2-pad", "qwen3-pad"}) {
    Case c;
    c.family = family;
    c.rollouts = ragged_rollouts();
    c.edit = [](std::vector<Rollout>& rollouts, const ModelState&) {
      for (Rollout& rollout : rollouts)
        for (std::int32_t& id : rollout.response_ids)
          if (id % 5 == 0) id = kPadToken;
    };
    expect_all_plans(c, {7}, {{.tp = 4}});
  }
}

// Every rank of tp holds half of the experts; rows are dealt to the ranks, and each is sent to its experts once.
TEST(ExpertParallel, GivesTheGradientOfOneProcess) {
  for (const char* family : {"qwen3-moe", "qwen3-moe-plain", "qwen3-moe-sparse", "qwen3-moe-late", "qwen3-moe-all",
                             "qwen3-moe-ties", "qwen3-moe-128"}) {
    Case c;
    c.family = family;
    c.rollouts = ragged_rollouts();
    expect_all_plans(c, {0, 7}, {{.tp = 2, .ep = 2}});
    if (c.family != "qwen3-moe") continue;
    expect_all_plans(c, {0, 7}, {{.tp = 4, .ep = 4}});
    expect_all_plans(as_critic(c), {7}, {{.tp = 2, .ep = 2}});
    c.options.router_aux_loss_coef = 0.5, c.options.router_z_loss_coef = 0.1;
    expect_all_plans(c, {0, 7}, {{.tp = 2, .ep = 2}});
  }
}

// Experts over ranks that run other trees than each other, with more ranks than trees, too: a rank joins the others'
// passes without rows of its own.
TEST(ExpertParallelOverTrees, GivesTheGradientOfOneProcess) {
  for (const char* family : {"qwen3-moe", "qwen3-moe-sparse", "qwen3-moe-late", "qwen3-moe-ties"}) {
    Case c;
    c.family = family;
    c.rollouts = ragged_rollouts();
    expect_all_plans(c, {0, 7}, {{.dp = 2, .ep = 2}, {.tp = 2, .dp = 2, .ep = 4}});
    if (c.family != "qwen3-moe") continue;
    expect_all_plans(c, {7}, {{.dp = 4, .ep = 2}, {.dp = 8, .ep = 8}, {.tp = 2, .dp = 4, .ep = 4}});
    expect_all_plans(as_critic(c), {7}, {{.dp = 2, .ep = 2}});
    for (const char* scope : {"rollout", "minibatch"}) {
      c.options.router_aux_loss_coef = 0.5, c.options.router_z_loss_coef = 0.1;
      c.options.router_aux_loss_scope = scope;
      expect_all_plans(c, {0, 7}, {{.dp = 4, .ep = 4}});
    }
  }
}

// Ranks of cp come to what they divide at the same place in the order of events; stages of pp have waves of others in
// flight as well as their own; experts of neighbouring ranks of dp where ep does not hold whole groups of cp.
TEST(ExpertParallelOverRowsAndStages, GivesTheGradientOfOneProcess) {
  const std::vector<Degrees> four = {{.cp = 2, .ep = 2},
                                     {.cp = 4, .ep = 2},
                                     {.cp = 2, .pp = 2, .ep = 2},
                                     {.pp = 2, .dp = 2, .ep = 2}},
                             more = {{.cp = 2, .dp = 2, .ep = 4},
                                     {.cp = 3, .dp = 2, .ep = 2},
                                     {.tp = 2, .pp = 2, .dp = 2, .ep = 4},
                                     {.cp = 2, .pp = 2, .dp = 2, .ep = 4},
                                     {.cp = 4, .pp = 2, .ep = 2}};
  for (const char* family : {"qwen3-moe", "qwen3-moe-late"}) {
    Case c = ragged(family);
    expect_all_plans(c, {7}, four);
    c.options.router_aux_loss_coef = 0.5, c.options.router_z_loss_coef = 0.1;
    c.options.router_aux_loss_scope = c.family == "qwen3-moe" ? "rollout" : "minibatch";
    expect_all_plans(c, {7}, more);
  }
  expect_all_plans(as_critic(ragged("qwen3-moe")), {7}, {{.cp = 2, .ep = 2}, {.pp = 2, .dp = 2, .ep = 2}});
}

// Trees are dealt to the ranks of dp; each of them is two ranks of tp.
TEST(TensorAndDataParallel, GiveTheGradientOfOneProcess) {
  for (const char* family : {"qwen3", "llama-bias-odd"}) {
    Case c;
    c.family = family;
    c.rollouts = ragged_rollouts();
    expect_all_plans(c, {0, 7}, {{.tp = 2, .dp = 2}});
  }
  Case c;
  c.family = "qwen3-moe";
  c.rollouts = ragged_rollouts();
  c.options.router_aux_loss_coef = 0.5, c.options.router_z_loss_coef = 0.1;
  expect_all_plans(c, {7}, {{.tp = 2, .dp = 2}, {.tp = 2, .dp = 2, .ep = 2}});
}

// Sums are taken in another order, each no less exact than in one process.
TEST(Float32, ALayoutIsAsExactAsOneProcess) {
  for (const char* family : {"qwen3", "llama-bias", "qwen3-moe"}) {
    Case c;
    c.family = family;
    c.rollouts = ragged_rollouts();
    for (c.seed = 31; c.seed <= 33; ++c.seed)
      for (const Plan& plan : all_plans({7})) {
        const Case planned = with(c, plan);
        const at::Tensor truth = run_case(planned).gradient;
        const double floor = (run_case(planned, DType::float32).gradient - truth).norm().item<double>();
        for (const Degrees& degrees : kLayouts)
          EXPECT_LE((run_layout(planned, degrees, DType::float32).gradient - truth).norm().item<double>(), 2 * floor)
              << text_of_degrees(degrees) << ", " << plan.name << ", " << family << ", seed " << c.seed;
      }
  }
}

}  // namespace
}  // namespace espalier::testing
