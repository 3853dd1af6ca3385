// Weights, gradients and state sharded over the ranks that would hold the same (--shard full): the gradient of one
// process, while a rank holds only its part.
#include <gtest/gtest.h>

#include <algorithm>
#include <vector>

#include "espalier/data/training_data.h"
#include "espalier/forecast/memory_model.h"
#include "tests/parallel/layouts.h"

namespace espalier::testing {
namespace {

std::vector<Degrees> full(std::vector<Degrees> layouts) {
  for (Degrees& degrees : layouts) degrees.full = true;
  return layouts;
}

class FullSharding : public ::testing::TestWithParam<const char*> {};

// 7 ranks are more than there are trees: some run nothing but join all events of the others.
TEST_P(FullSharding, EveryPlanGivesTheGradientOfOneProcess) {
  expect_all_plans(ragged(GetParam()), {7}, full({{.dp = 2}, {.dp = 7}, {.tp = 2, .dp = 2}}));
}
TEST_P(FullSharding, ACriticToo) { expect_all_plans(as_critic(ragged(GetParam())), {7}, full({{.dp = 3}})); }
INSTANTIATE_TEST_SUITE_P(Models, FullSharding,
                         ::testing::Values("llama-bias", "qwen2", "qwen3-odd", "qwen3-pad", "qwen3-moe-late",
                                           "DeepseekV3"),
                         [](const auto& info) {
                           std::string name = info.param;
                           std::erase(name, '-');
                           return name;
                         });

// Ranks of cp have waves of their own between trunks that they divide, and stages keep waves in flight.
TEST(FullShardingMixed, RowsAndLayersAreShardedToo) {
  for (const char* family : {"qwen3", "qwen3-moe"})
    expect_all_plans(ragged(family), {5},
                     full({{.cp = 2}, {.cp = 3, .dp = 2}, {.pp = 3, .dp = 2}, {.cp = 2, .pp = 2, .dp = 2}}));
}

// Experts are sharded over the ranks that hold the same ones, maybe only one rank.
TEST(FullShardingMixed, ExpertsAreSpreadToo) {
  Case c = ragged("qwen3-moe-sparse");
  c.options.router_aux_loss_coef = 0.3, c.options.router_z_loss_coef = 0.1;
  c.options.router_aux_loss_scope = "minibatch";
  expect_all_plans(c, {7}, full({{.dp = 4, .ep = 2}, {.dp = 2, .ep = 2}, {.tp = 2, .dp = 2, .ep = 2}}));
}

TEST(FullShardingMixed, LossesOfWholeRollouts) {
  Case c = ragged("qwen3");
  c.options.policy_loss = "gspo", c.options.entropy_coeff = 0.1;
  expect_all_plans(c, {7}, full({{.dp = 3}, {.cp = 2, .dp = 2}, {.pp = 2, .dp = 2}}));
}

// Responses that begin alike fork below their prompt, and runs longer than the budget are chains.
TEST(FullShardingMixed, TreesOfDepthTwo) {
  Case c = ragged("qwen3");
  c.rollouts.groups = 8, c.rollouts.shared_start = 0.7;
  expect_all_plans(c, {3}, full({{.dp = 3}, {.cp = 2, .dp = 2}}));
}

// An eighth of everything, and rooms for two layers, an end and a norm: what is held is what is planned.
TEST(FullShardingMemory, OfEverythingAPartAndRoomsForUnits) {
  const Case c = ragged("llama");
  const Degrees eight{.dp = 8, .full = true};
  for (const DType dtype : {DType::float32, DType::bfloat16}) {
    const StepKind kind;
    const std::int64_t one = ActivationBytes(shape_of(c), dtype, kind).model();
    run_ranks(eight, [&](const Mesh& mesh) {
      const auto model = tiny_model(c.family, dtype, c.seed, false, mesh);
      AdamW optimizer(model->table, model->weights, {}, model->decoder.device(), {.world = mesh.world});
      Options options = test_options();
      options.dtype = name_of(dtype);
      Actor actor(*model, options, default_profile("cpu", dtype, 1), &optimizer);
      const std::int64_t weights = static_cast<std::int64_t>(model->weights.nbytes()),
                         elements = weights / bytes_of(dtype);
      const std::int64_t state =
          static_cast<std::int64_t>(optimizer.exp_avg().nbytes() + optimizer.exp_avg_sq().nbytes()) +
          (dtype == DType::bfloat16 ? static_cast<std::int64_t>(optimizer.masters().nbytes()) : 0);
      const std::int64_t rooms = static_cast<std::int64_t>(model->rooms.nbytes()) + actor.gradients.room_bytes();
      const std::int64_t held = weights + static_cast<std::int64_t>(actor.gradients.flat().nbytes()) + state + rooms;
      EXPECT_EQ(held, actor.held_bytes());
      // Every unit is filled up to a multiple of 8.
      const auto units = static_cast<std::int64_t>(model->table.units().all.size());
      EXPECT_GE(elements * 8, model->table.size());
      EXPECT_LT(elements * 8, model->table.size() + 8 * units);
      EXPECT_LE(held - rooms, one / 8 + units * 20);
    });
  }
}

}  // namespace
}  // namespace espalier::testing
