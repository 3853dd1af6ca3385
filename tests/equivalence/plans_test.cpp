// Every plan of a step gives the gradient, the loss and the log-probs of torch autograd on a plain forward.
#include <ATen/core/Tensor.h>
#include <ATen/ops/equal.h>
#include <gtest/gtest.h>

#include <cstdlib>

#include "tests/equivalence/against_autograd.h"
#include "tests/equivalence/factors.h"

namespace espalier::testing {
namespace {

// On another device (ESPALIER_TEST_DEVICE) one draw and two budgets: it runs the same arithmetic, what it may get wrong
// is where memory lies and when work runs, and each operation takes it long.
const bool kOnHost = std::getenv("ESPALIER_TEST_DEVICE") == nullptr;
const std::vector<std::int64_t> kBudgets =
    kOnHost ? std::vector<std::int64_t>{0, 1, 2, 7, 20} : std::vector<std::int64_t>{1, 7};

class Families : public ::testing::TestWithParam<const char*> {};

TEST_P(Families, EveryPlanEqualsAutograd) {
  Case c;
  c.family = GetParam();
  c.rollouts = ragged_rollouts();
  for (c.seed = 1; c.seed <= (kOnHost ? 3 : 1); ++c.seed) expect_all_plans(c, kBudgets);
}

TEST_P(Families, EveryPlanOfACriticEqualsAutograd) {
  Case c;
  c.family = GetParam();
  c.rollouts = ragged_rollouts();
  c.rollouts.temperature_low = 0.7, c.rollouts.temperature_high = 1.3;  // which are the policy's alone
  expect_all_plans(as_critic(c), kBudgets);
}
INSTANTIATE_TEST_SUITE_P(Models, Families, ::testing::ValuesIn(kVariants),
                         [](const auto& info) { return name_of_family(info.param); });

// One skeleton of a block has all places of norms, whatever mixes its rows: behind the halves, or before and behind.
TEST(NormPlaces, OfHybridsEqualAutograd) {
  for (const char* family : {"qwen3-next-after", "qwen3-next-both"}) {
    Case c;
    c.family = family;
    c.rollouts = ragged_rollouts();
    expect_all_plans(c, {7});
  }
}

// Each row of the table of families, with properties that its own sizes would hide (fixture.cpp).
class Table : public ::testing::TestWithParam<std::string> {};

TEST_P(Table, EveryPlanEqualsAutograd) {
  Case c;
  c.family = GetParam();
  c.rollouts = ragged_rollouts();
  expect_all_plans(c, {1, 7});
}

TEST_P(Table, EveryPlanOfACriticEqualsAutograd) {
  Case c;
  c.family = GetParam();
  c.rollouts = ragged_rollouts();
  expect_all_plans(as_critic(c), {1, 7});
}

TEST_P(Table, StatesGiveTheBitsOfKeptState) {
  Case c;
  c.family = GetParam();
  c.rollouts = ragged_rollouts();
  c.options.schedule = "phased", c.options.token_budget = 7;
  c.options.trunk_state = "keep", c.options.wave_state = "keep";
  const at::Tensor kept = run_case(c).gradient;
  for (const char* trunks : {"keep", "recompute", "offload"})
    for (const char* waves : {"keep", "recompute"})
      for (const char* path : {"keep", "offload"}) {
        SCOPED_TRACE(text_of("trunks ", trunks, ", waves ", waves, ", path ", path));
        c.options.trunk_state = trunks, c.options.wave_state = waves, c.options.path_state = path;
        EXPECT_TRUE(at::equal(run_case(c).gradient, kept));
      }
}

INSTANTIATE_TEST_SUITE_P(Models, Table, ::testing::ValuesIn(families_of_table()),
                         [](const auto& info) { return info.param; });

// Every fifth id is the pad token: looked up, it gets no gradient under any plan; what a tied head adds to its row
// stays.
TEST(PadToken, HasNoGradientButThatOfATiedHead) {
  for (const std::string family : {"qwen2", "qwen3", "llama"}) {
    Case c;
    c.rollouts = ragged_rollouts();
    c.edit = [](std::vector<Rollout>& rollouts, const ModelState&) {
      for (Rollout& rollout : rollouts)
        for (std::vector<std::int32_t>* ids : {&rollout.prompt_ids, &rollout.response_ids})
          for (std::int32_t& id : *ids)
            if (id % 5 == 0) id = kPadToken;
    };
    const auto row_of = [&](const at::Tensor& gradient) {
      const Parameter embedding = ParameterTable(shape_of(c)).at("model.embed_tokens.weight");
      return gradient.narrow(0, embedding.offset, embedding.count).view(embedding.shape)[kPadToken];
    };
    c.family = family;
    const at::Tensor plain = row_of(run_case(c).gradient).clone();
    c.family = family + "-pad";
    const OracleResult expected = run_oracle(c);
    for (const Plan& plan : all_plans({0, 7})) {
      SCOPED_TRACE(plan.name + ", " + c.family);
      const at::Tensor gradient = run_case(with(c, plan)).gradient;
      const Worst worst = worst_parameter(c, gradient, expected.gradient);
      EXPECT_LE(worst.error, kFloat64) << worst.parameter;
      EXPECT_GT((plain - row_of(gradient)).abs().max().item<double>(), 1e-4) << "no rollout has the token";
      EXPECT_EQ(row_of(gradient).abs().max().item<double>() > 0, shape_of(c).tied_head);
    }
  }
}

// The smallest step with every kind of kernel: experts, windows and caps, sinks, latents and states.
TEST(Steps, OfEveryKindOfLayerEqualAutograd) {
  for (const char* family : {"qwen3-moe", "Gemma2", "GptOss", "KimiLinear", "gemma4-moe"}) {
    SCOPED_TRACE(family);
    Case c = with(ragged(family), {"", "phased", 7, "recompute"});
    c.rollouts.groups = 2;
    expect_as_autograd(c, run_oracle(c));
  }
}

class Losses : public ::testing::TestWithParam<Loss> {};

TEST_P(Losses, EveryPlanEqualsAutograd) {
  Case c;
  set_loss(c, GetParam());
  c.rollouts = ragged_rollouts();
  c.rollouts.temperature_low = 0.7, c.rollouts.temperature_high = 1.3;
  for (c.seed = 11; c.seed <= 12; ++c.seed) expect_all_plans(c, {0, 1, 9});
}
INSTANTIATE_TEST_SUITE_P(Objectives, Losses, ::testing::ValuesIn(kLosses));

TEST(ValueLosses, EveryAggregationOnEveryPlanEqualsAutograd) {
  Case c;
  c.rollouts = ragged_rollouts();
  c = as_critic(c);
  c.options.policy_loss = "gspo";  // its default aggregation is not the critic's
  c.options.cliprange_value = 0.2;
  c.seed = 61;
  for (const char* mode :
       {"", "token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"}) {
    c.options.loss_agg_mode = mode;
    expect_all_plans(c, {0, 9});
    EXPECT_GT(run_case(c).critic.loss.clip_fraction, 0);
  }
}

class LongPrompts : public ::testing::TestWithParam<const char*> {};

// Prompts of several times what a window shows: below a trunk, layers with a window keep its last rows.
TEST_P(LongPrompts, EveryPlanEqualsAutogradWhereWindowsKeepTheLastRows) {
  Case c;
  c.family = GetParam();
  c.rollouts = ragged_rollouts();
  c.rollouts.groups = 4;
  c.rollouts.group_size = {2, 3};
  c.rollouts.prompt_length = {150, 200};
  expect_all_plans(c, {0, 80});
  const StepPlan plan = run_case(with(c, {"", "phased", 80, "recompute"})).report.plan;
  EXPECT_GT(plan.max_path_rows, 100);
  EXPECT_LT(plan.max_window_rows, plan.max_path_rows);
  for (const char* const path : {"offload", "keep"}) {
    Case other = with(c, {"", "phased", 80, "recompute"});
    other.options.path_state = path;
    expect_same_bits(run_case(other), run_case(with(c, {"", "dense", 0, "auto"})));
  }
}
INSTANTIATE_TEST_SUITE_P(Models, LongPrompts,
                         ::testing::Values("qwen3-window", "llama-windows", "Gemma3", "GptOss", "Cwm"),
                         [](const auto& info) { return name_of_family(info.param); });

// The generator's own choice of everything; a failing seed is printed by SCOPED_TRACE.
TEST(Generated, EveryPlanEqualsAutograd) {
  const char* families[] = {"llama", "llama-bias", "qwen2", "qwen3-window", "qwen3-moe"};
  for (std::uint64_t seed = 100; seed < 124; ++seed) {
    Case c;
    c.seed = seed;
    c.family = families[seed % 5];
    c.rollouts = any_options(seed, 12);
    c.rollouts.vocabulary = 50;
    c.rollouts.rewards = true;
    expect_all_plans(c, {0, static_cast<std::int64_t>(1 + seed % 13)});
    if (seed % 2 == 0) expect_all_plans(as_critic(c), {0, static_cast<std::int64_t>(1 + seed % 13)});
  }
}

// In float32 a plan may be twice as far from the float64 truth as the dense plan is.
void expect_float32_as_exact_as_dense(Case c) {
  for (c.seed = 21; c.seed <= 24; ++c.seed) {
    const at::Tensor truth = run_oracle(c).gradient;
    Case dense = with(c, {"dense", "dense", 0, "auto"});
    const at::Tensor dense_gradient = run_case(dense, DType::float32).gradient;
    for (const Plan& plan : all_plans({0, 1, 7})) {
      SCOPED_TRACE(plan.name + ", seed " + std::to_string(c.seed));
      const at::Tensor gradient = run_case(with(c, plan), DType::float32).gradient;
      const double error = (gradient - truth).norm().item<double>(),
                   floor = (dense_gradient - truth).norm().item<double>();
      EXPECT_GT(floor, 0);
      EXPECT_LE(error, 2 * floor);
    }
  }
}

TEST(Float32, EveryPlanIsAsExactAsDense) {
  Case c;
  c.rollouts = ragged_rollouts();
  expect_float32_as_exact_as_dense(c);
}

TEST(Float32, EveryPlanOfACriticIsAsExactAsDense) {
  Case c;
  c.rollouts = ragged_rollouts();
  expect_float32_as_exact_as_dense(as_critic(c));
}

class Bfloat16 : public ::testing::TestWithParam<const char*> {};

// A choice that flips because of rounding is an error of dense's own kind and size.
void expect_phased_as_exact_as_dense(Case c) {
  for (c.seed = 31; c.seed <= 33; ++c.seed) {
    const at::Tensor truth = run_oracle(c).gradient;
    const at::Tensor dense = run_case(with(c, {"", "dense", 0, "auto"}), DType::bfloat16).gradient;
    const double floor = (dense - truth).norm().item<double>();
    for (const char* state : {"keep", "recompute"}) {
      const at::Tensor phased = run_case(with(c, {"", "phased", 9, state}), DType::bfloat16).gradient;
      EXPECT_LE((phased - truth).norm().item<double>(), 2 * floor) << state << ", seed " << c.seed;
    }
  }
}

TEST_P(Bfloat16, PhasedIsAsExactAsDense) {
  Case c;
  c.family = GetParam();
  c.rollouts = ragged_rollouts();
  c.rollouts.policy = PolicyAge::none;  // ratios of 1: clipping cannot flip on rounded log-probs
  expect_phased_as_exact_as_dense(c);
}

TEST_P(Bfloat16, PhasedIsAsExactAsDenseForACritic) {
  Case c;
  c.family = GetParam();
  c.rollouts = ragged_rollouts();
  c = as_critic(c);
  c.options.cliprange_value = 1000;  // clipping cannot flip on rounded values
  expect_phased_as_exact_as_dense(c);
}

INSTANTIATE_TEST_SUITE_P(Models, Bfloat16,
                         ::testing::Values("qwen3", "qwen3-window", "qwen3-moe", "qwen3-moe-128", "qwen3-next"),
                         [](const auto& info) { return name_of_family(info.param); });

}  // namespace
}  // namespace espalier::testing
