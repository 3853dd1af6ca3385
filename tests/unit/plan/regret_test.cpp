// Regret of the automatic schedule: its modelled time against the best fixed plan over schedules and budgets.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <iostream>

#include "espalier/base/error.h"
#include "espalier/base/random.h"
#include "espalier/mixers/attention/shape.h"
#include "tests/unit/plan/shapes.h"

namespace espalier {
namespace {

ModelShape shape_of(std::int64_t layers, std::int64_t hidden, std::int64_t inner, std::int64_t heads,
                    std::int64_t kv_heads, std::int64_t head_dim, std::int64_t vocabulary) {
  ModelShape shape = testing::tiny_shape();
  shape.hidden = hidden, shape.vocabulary = vocabulary;
  shape.layer =
      attention_layers(layers, {.heads = heads, .kv_heads = kv_heads, .head_dim = head_dim, .qk_norm = true}, inner);
  return shape;
}

ModelShape with_experts(ModelShape shape, std::int64_t experts, std::int64_t chosen, std::int64_t inner) {
  shape.experts = experts, shape.experts_per_token = chosen, shape.expert_inner = inner;
  for (LayerShape& layer : shape.layer) layer.mlp = MlpKind::experts;
  return shape;
}

// 1 .. 128 responses a prompt, prompts of 0 .. 99 % of a rollout, ragged; every third workload branches in turns.
std::vector<Rollout> workload(Random& random) {
  std::vector<Rollout> batch;
  const std::int64_t groups = random.integer(1, 4);
  std::int32_t next = 10;
  const auto fresh = [&](std::vector<std::int32_t>& ids, std::int64_t count) {
    for (std::int64_t i = 0; i < count; ++i) ids.push_back(next++);
  };
  const bool turns = random.chance(0.33);
  for (std::int64_t g = 0; g < groups; ++g) {
    const std::int64_t n = std::int64_t{1} << random.integer(0, g == 0 ? 7 : 4);
    const std::int64_t length = std::int64_t{1} << random.integer(5, n > 32 ? 10 : 12);
    const double share = random.uniform(0, 0.99);
    const std::int64_t prompt = std::max<std::int64_t>(1, std::llround(share * static_cast<double>(length)));
    const std::int64_t response = std::max<std::int64_t>(1, length - prompt);
    const bool ragged = random.chance(0.5);
    std::vector<std::int32_t> ids, branch;
    fresh(ids, prompt);
    for (std::int64_t i = 0; i < n; ++i) {
      Rollout rollout;
      rollout.prompt_ids = ids;
      if (turns && i % 4 == 0) branch.clear(), fresh(branch, response / 2);
      if (turns) rollout.response_ids = branch;
      fresh(rollout.response_ids, std::max<std::int64_t>(1, ragged ? random.integer(1, response) : response));
      rollout.loss_mask.assign(rollout.response_ids.size(), 1);
      batch.push_back(std::move(rollout));
    }
  }
  return batch;
}

const std::vector<ModelShape>& shapes() {
  static const std::vector<ModelShape> all = {shape_of(2, 64, 172, 8, 4, 8, 512),
                                              shape_of(4, 128, 384, 4, 2, 32, 4096),
                                              shape_of(8, 512, 1536, 8, 2, 64, 8192),
                                              shape_of(28, 1024, 3072, 16, 8, 128, 151936),
                                              testing::llama_3_8b(),
                                              with_experts(shape_of(4, 128, 384, 4, 2, 32, 4096), 8, 2, 192),
                                              with_experts(shape_of(8, 512, 1536, 8, 2, 64, 8192), 128, 8, 192),
                                              testing::qwen3_30b_a3b()};
  return all;
}

class Regret : public ::testing::TestWithParam<std::uint64_t> {};

TEST_P(Regret, AutoIsWithinTwoPercentOfTheBestFixedPlanAndNeverAboveDense) {
  const ModelShape& shape = shapes()[GetParam()];
  double worst = 0;
  for (std::uint64_t seed = GetParam(); seed < 384; seed += shapes().size()) {
    SCOPED_TRACE(::testing::Message() << "seed " << seed);
    Random random(seed);
    const std::vector<Rollout> batch = workload(random);
    const bool gpu = seed % 7 == 6;
    const DType dtype = gpu ? DType::bfloat16 : DType::float32;
    const MachineProfile profile = default_profile(gpu ? "cuda" : "cpu", dtype, 2 << seed % 4);
    const std::vector<PrefixTree> trees = build_prefix_trees(batch, ShareMode::whole_trees);
    PlanOptions options;
    options.dtype = dtype;
    const StepPlan plan = make_plan(batch, trees, shape, options, profile);
    const double automatic = plan.chosen.seconds;
    EXPECT_LE(automatic, plan.dense.seconds);
    double best = HUGE_VAL;
    std::string winner;
    for (const Schedule schedule : {Schedule::dense, Schedule::packed, Schedule::phased})
      for (const std::int64_t budget : {0, 512, 1024, 2048, 4096, 8192, 16384, 65536}) {
        if (budget > 16384 && shape.experts == 0) continue;
        options.schedule = schedule, options.token_budget = budget;
        const double seconds = make_plan(batch, trees, shape, options, profile).chosen.seconds;
        if (seconds >= best) continue;
        best = seconds;
        winner = text_of(name_of(schedule), " with ", budget, " rows a wave");
      }
    worst = std::max(worst, automatic / best - 1);
    EXPECT_LE(automatic, 1.02 * best) << winner;
  }
  RecordProperty("worst_percent", std::to_string(100 * worst));
  std::cout << "worst regret " << 100 * worst << " %\n";
}
INSTANTIATE_TEST_SUITE_P(Shapes, Regret, ::testing::Range(std::uint64_t{0}, std::uint64_t{8}));

}  // namespace
}  // namespace espalier
