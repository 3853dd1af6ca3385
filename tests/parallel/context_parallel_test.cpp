// Rows of trunks sharded over cp and waves dealt to its ranks: the gradient of one process.
#include <ATen/core/Tensor.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <functional>

#include "espalier/mixers/latent_attention/shape.h"
#include "espalier/program/shared_runs.h"
#include "tests/parallel/layouts.h"

namespace espalier::testing {
namespace {

class ContextParallel : public ::testing::TestWithParam<const char*> {};

// Prompts of few tokens leave some of four ranks without rows.
TEST_P(ContextParallel, EveryPlanGivesTheGradientOfOneProcess) {
  expect_all_plans(ragged(GetParam()), {0, 7}, {{.cp = 2}, {.cp = 4}});
}
TEST_P(ContextParallel, ACriticToo) { expect_all_plans(as_critic(ragged(GetParam())), {7}, {{.cp = 3}}); }
INSTANTIATE_TEST_SUITE_P(Models, ContextParallel,
                         ::testing::Values("llama", "llama-bias", "qwen2", "qwen3", "qwen3-pad", "qwen3-window",
                                           "qwen3-window-sinks", "qwen3-moe", "qwen3-moe-sparse", "qwen3-moe-late",
                                           "DeepseekV2", "DeepseekV3", "qwen3-next", "qwen3-next-last", "Bamba",
                                           "GraniteMoeHybrid", "NemotronH", "KimiLinear", "Lfm2", "Gemma4"),
                         [](const auto& info) { return name_of_family(info.param); });

// Derivatives that need whole rollouts: log-probs and derivatives of rows elsewhere. Several temperatures.
TEST(ContextParallelLosses, EveryPlanGivesTheGradientOfOneProcess) {
  for (const char* policy_loss : {"gspo", "reinforce", "vanilla"}) {
    Case c = ragged("qwen3");
    c.options.policy_loss = policy_loss, c.options.entropy_coeff = 0.02, c.options.kl_loss_coef = 0.05;
    c.options.rollout_is = c.options.policy_loss == "reinforce" ? "sequence" : "none";
    c.rollouts.temperature_low = 0.7, c.rollouts.temperature_high = 1.3;
    c.seed = 11;
    expect_all_plans(c, {0, 5}, {{.cp = 2}, {.cp = 3}});
  }
}

TEST(ContextParallelRouters, LossesAndLoadsAreThoseOfOneProcess) {
  for (const char* scope : {"rollout", "minibatch"}) {
    Case c = ragged("qwen3-moe-odd");
    c.options.router_aux_loss_coef = 0.5, c.options.router_z_loss_coef = 0.1;
    c.options.router_aux_loss_scope = scope;
    for (const Plan& plan : all_plans({0, 7})) {
      const Case planned = with(c, plan);
      const Outcome one = run_case(planned);
      for (const std::int64_t cp : {2, 3}) {
        SCOPED_TRACE(text_of("cp ", cp, ", ", plan.name, ", scope ", scope));
        expect_as_one_process(planned, {.cp = cp}, one);
        for (const Outcome& rank : run_layout(planned, {.cp = cp}).ranks) {
          EXPECT_EQ(rank.report.router.load, one.report.router.load);
          EXPECT_NEAR(rank.report.router.aux_loss, one.report.router.aux_loss, kFloat64);
          EXPECT_NEAR(rank.report.router.z_loss, one.report.router.z_loss, kFloat64);
        }
      }
    }
  }
}

// Responses that begin alike fork below their prompt; a budget of 3 rows cuts every path into chains.
TEST(ContextParallelTrees, NestedTrunksAndChainsGiveTheGradientOfOneProcess) {
  for (const char* family : {"qwen3", "qwen3-moe", "qwen3-next"}) {
    Case c = ragged(family);
    c.rollouts.groups = 4, c.rollouts.shared_start = 0.8, c.rollouts.nested_prompt = 0.5;
    expect_all_plans(c, {3, 6}, {{.cp = 2}});
    c.options.policy_loss = "gspo";
    expect_all_plans(c, {3}, {{.cp = 2}});
  }
}

TEST(ContextParallelLayouts, MixWithTensorAndDataParallel) {
  const std::vector<Degrees> layouts = {{.tp = 2, .cp = 2}, {.cp = 2, .dp = 2}, {.tp = 2, .cp = 2, .dp = 2}};
  expect_all_plans(ragged("qwen3"), {0, 7}, layouts);
  expect_all_plans(ragged("qwen3-next-moe"), {7}, layouts);
  Case c = ragged("qwen3-moe");
  c.options.router_aux_loss_coef = 0.5, c.options.router_z_loss_coef = 0.1;
  expect_all_plans(c, {7}, layouts);
  expect_all_plans(c, {7}, {{.tp = 2, .cp = 2, .ep = 2}});  // the ranks of tp hold half of the experts each
  expect_all_plans(c, {7}, {{.cp = 3, .dp = 2, .ep = 2}});  // and here ranks of two groups of cp
}

// As the items of this rank's plan are run.
void for_each_item(const std::vector<PlanItem>& items, const std::function<void(const PlanItem&)>& visit) {
  for (const PlanItem& item : items) {
    visit(item);
    for_each_item(item.below, visit);
  }
}

// Groups of four whose responses fill a wave of 7 rows each.
Case four_responses(const char* family = "qwen3") {
  Case c = ragged(family);
  c.rollouts.group_size = {4, 4}, c.rollouts.prompt_length = {8, 14}, c.rollouts.response_length = {6, 6};
  c.rollouts.shared_start = c.rollouts.empty_response = c.rollouts.equal_response = 0;
  c.rollouts.nested_prompt = c.rollouts.continues = c.rollouts.late_difference = 0;
  return with(c, {"phased", "phased", 7, "keep"});
}

// Given the path, suffixes do not depend on each other: the ranks that run them tell each other nothing.
TEST(ContextParallelBytes, OfSuffixesAreZero) {
  const Case c = four_responses();
  for (const std::int64_t cp : {2, 4})
    for (const Outcome& rank : run_layout(c, {.cp = cp}).ranks) {
      for_each_item(rank.report.plan.items, [&](const PlanItem& item) {
        EXPECT_EQ(item.kind == ItemKind::trunk, is_sharded(item, cp)) << "waves are whole";
      });
      EXPECT_GT(rank.report.bytes.a.cp, 0);
      EXPECT_EQ(rank.report.bytes.b.cp, 0);
      EXPECT_GT(rank.report.bytes.c.cp, 0);
    }
}

// The rank with most bytes: it holds a trunk's saved state for its share, and the whole path. If the path sleeps, it
// holds one layer of it, beside its share of the other layers if they are sharded.
void expect_planned_memory(const char* family, const std::vector<std::string>& paths) {
  for (const char* state : {"keep", "recompute"})
    for (const std::string& path : paths)
      for (const std::int64_t cp : {2, 4}) {
        SCOPED_TRACE(text_of("cp ", cp, ", ", state, ", path ", path, ", ", family));
        Case c = four_responses(family);
        c.options.trunk_state = state, c.options.path_state = path;
        const PassReport report = run_layout(c, {.cp = cp}).ranks.front().report;
        const PhasePeaks planned = predicted_arena_bytes(c, report.plan, DType::float64);
        EXPECT_EQ(report.arena_bytes.a, planned.a);
        EXPECT_EQ(report.arena_bytes.b, planned.b);
        EXPECT_EQ(report.arena_bytes.c, planned.c);
        EXPECT_EQ(report.plan.path.state(), c.options.path_state);
        EXPECT_EQ(report.plan.chosen.path_stored_bytes > 0, path.ends_with("offload"));
        EXPECT_LT(planned.c, run_case(c).report.arena_bytes.c);
      }
}
TEST(ContextParallelMemory, IsThatOfThePlan) {
  expect_planned_memory("qwen3", {"keep", "offload", "divide"});
  expect_planned_memory("DeepseekV2", {"keep", "offload", "divide", "latents", "latents-offload", "latents-divide"});
}

// A wave's peak has room for the states of one that ranks share, which these are not.
TEST(ContextParallelMemory, OfRecurrentLayersIsThatOfThePlan) {
  for (const char* family : {"qwen3-next", "NemotronH"})
    for (const char* state : {"keep", "recompute"})
      for (const std::int64_t cp : {2, 4}) {
        SCOPED_TRACE(text_of("cp ", cp, ", ", state, ", ", family));
        Case c = with(four_responses(family), {"phased", "phased", 0, "keep"});
        c.rollouts.prompt_length = {32, 40};  // one trunk, and all pieces of a share have rows
        c.options.trunk_state = state, c.options.path_state = "keep";
        const PassReport report = run_layout(c, {.cp = cp}).ranks.front().report;
        const PhasePeaks planned = predicted_arena_bytes(c, report.plan, DType::float64);
        EXPECT_EQ(report.arena_bytes.a, planned.a);
        EXPECT_LE(report.arena_bytes.b, planned.b);
        EXPECT_EQ(report.arena_bytes.c, planned.c);
      }
}

// A rank sends the state behind each of its legs to the next one, again in the backward and with its gradient back, and
// the last state to all.
TEST(ContextParallelBytes, OfRecurrentLayersAreThoseOfStates) {
  const Case c = four_responses("qwen3-next-all");
  const ModelShape shape = shape_of(c);
  const std::int64_t states = shape.states() * 8;
  const std::vector<Outcome> ranks = run_layout(c, {.cp = 2}).ranks;
  std::int64_t trunks = 0;
  for_each_item(ranks.front().report.plan.items, [&](const PlanItem& item) {
    if (item.kind != ItemKind::trunk) return;
    ++trunks;
    EXPECT_EQ(SharedRuns(item.set, RowShares(item.set.rows, 2)).legs.size(), 3U);
  });
  // Rank 0 has the first and the last leg, rank 1 that between them.
  EXPECT_EQ(ranks[0].report.bytes.a.cp, trunks * 2 * states);
  EXPECT_EQ(ranks[1].report.bytes.a.cp, trunks * states);
  for (const Outcome& rank : ranks) EXPECT_EQ(rank.report.bytes.c.cp, trunks * 3 * states);
}

// With latent attention ranks give latents and shared keys to each other, in every path.
TEST(ContextParallelBytes, OfLatentAttentionAreThoseOfLatents) {
  for (const char* path : {"keep", "latents"}) {
    Case c = four_responses("DeepseekV3");
    c.options.path_state = path;
    const ModelShape shape = shape_of(c);
    const PassReport report = run_layout(c, {.cp = 2}).ranks.front().report;
    std::int64_t rows = 0;
    for_each_item(report.plan.items, [&](const PlanItem& item) {
      if (item.kind == ItemKind::trunk) rows += RowShares(item.set.rows, 2).most();
    });
    const LatentShape& latent = static_cast<const LatentAttention&>(shape.mixer(0)).shape;
    const std::int64_t width = latent.key_value + latent.rotary, once = shape.layers() * rows * width * 8;
    EXPECT_LT(width, latent.query_width() + latent.value_width());
    EXPECT_EQ(report.bytes.a.cp, once) << path;
    EXPECT_EQ(report.bytes.c.cp, 2 * once + (report.plan.path.latents ? 0 : once)) << path;
  }
}

TEST(ContextParallelRows, EveryPromptIsForwardedOnceInTheWholeWorld) {
  const Case c = with(ragged("qwen3"), {"phased", "phased", 7, "keep"});
  const Outcome one = run_case(c);
  for (const Degrees& degrees : {Degrees{.cp = 2}, Degrees{.cp = 4}, Degrees{.tp = 2, .cp = 2, .dp = 2}})
    for (const Outcome& rank : run_layout(c, degrees).ranks) {
      EXPECT_EQ(rank.report.trunk_rows, one.report.trunk_rows) << text_of_degrees(degrees);
      EXPECT_EQ(rank.report.wave_rows, one.report.wave_rows);
      EXPECT_EQ(rank.report.trunk_forwards, one.report.trunk_forwards);
    }
}

// Sums are taken in another order, each no less exact than in one process.
TEST(Float32ContextParallel, ALayoutIsAsExactAsOneProcess) {
  for (const char* family : {"qwen3", "qwen3-moe"})
    for (const Plan& plan : all_plans({7})) {
      Case c = with(ragged(family), plan);
      c.seed = 31;
      const at::Tensor truth = run_case(c).gradient;
      const double floor = (run_case(c, DType::float32).gradient - truth).norm().item<double>();
      EXPECT_LE((run_layout(c, {.cp = 3}, DType::float32).gradient - truth).norm().item<double>(), 2 * floor)
          << plan.name << ", " << family;
    }
}

}  // namespace
}  // namespace espalier::testing
