// The capacity frontier against plans of the same groups: what it says fits does, and hardly more.
#include "espalier/plan/frontier.h"

#include <gtest/gtest.h>

#include <limits>

#include "espalier/base/error.h"
#include "espalier/forecast/memory_model.h"
#include "espalier/mixers/attention/shape.h"
#include "tests/unit/plan/shapes.h"

namespace espalier {
namespace {

using testing::group_of;
using testing::planned;

PlanOptions within(std::int64_t bytes_above_constant, const ModelShape& shape) {
  PlanOptions options;
  options.memory_budget = ActivationBytes(shape, DType::float32).constant() + bytes_above_constant;
  options.spill_room = std::numeric_limits<std::int64_t>::max();
  return options;
}

ModelShape long_shape() {
  ModelShape shape = testing::tiny_shape();
  shape.hidden = 256, shape.max_positions = 1 << 19;
  // The path is narrower than the streams.
  shape.layer = attention_layers(12, {.heads = 4, .kv_heads = 1, .head_dim = 16, .qk_norm = true}, 96);
  return shape;
}

// As a user would ask for the cell's step.
StepPlan plan_of(const FrontierCell& cell, std::int64_t prompt, std::int64_t response, PlanOptions options,
                 const ModelShape& shape) {
  options.must_fit = false;
  options.schedule = cell.way == "dense" ? Schedule::dense : cell.way == "packed" ? Schedule::packed : Schedule::phased;
  options.trunk_state = cell.way == "phased, keep"        ? SavedState::keep
                        : cell.way == "phased, recompute" ? SavedState::recompute
                        : cell.way == "phased, offload"   ? SavedState::offload
                                                          : SavedState::automatic;
  if (cell.way == "dense") options.token_budget = prompt + response;
  if (cell.way == "packed") options.token_budget = prompt + cell.n * response;
  return planned(group_of(static_cast<std::int32_t>(prompt), static_cast<std::int32_t>(response),
                          static_cast<std::int32_t>(cell.n)),
                 options, ShareMode::whole_trees, shape);
}

TEST(Frontier, WhatFitsIsPlannedAndHardlyMoreIs) {
  const ModelShape shape = long_shape();
  const PlanOptions options = within(400 << 20, shape);
  constexpr std::int64_t kResponse = 256;
  const Frontier frontier = find_frontier(shape, options, testing::test_profile(), {4, 2}, kResponse);
  ASSERT_EQ(frontier.sizes, (std::vector<std::int64_t>{2, 4}));
  ASSERT_EQ(frontier.cells.size(), 2 * frontier.ways.size());
  for (const FrontierCell& cell : frontier.cells) {
    SCOPED_TRACE(text_of(cell.way, ", N = ", cell.n, ", prompt ", cell.prompt));
    ASSERT_GT(cell.prompt, 0);
    EXPECT_LE(cell.cost.bytes.peak(), options.memory_budget);
    const StepPlan plan = plan_of(cell, cell.prompt, kResponse, options, shape);
    EXPECT_TRUE(plan.chosen.fits);
    EXPECT_EQ(plan.chosen.bytes.peak(), cell.cost.bytes.peak());
    if (cell.limit == FrontierCell::Limit::memory) {
      EXPECT_FALSE(plan_of(cell, cell.prompt + cell.prompt / 256 + 2, kResponse, options, shape).chosen.fits);
    }
  }
  // Dense does not know of its group; who shares and stores less holds more.
  EXPECT_EQ(frontier.cell(0, 0).prompt, frontier.cell(1, 0).prompt);
  for (std::size_t size = 0; size < 2; ++size) {
    EXPECT_LT(frontier.cell(size, 1).prompt, frontier.cell(size, 0).prompt) << "packed holds all responses";
    EXPECT_LE(frontier.cell(size, 2).prompt, frontier.cell(size, 3).prompt);
    EXPECT_LT(frontier.cell(size, 3).prompt, frontier.cell(size, 4).prompt);
    EXPECT_GT(frontier.factor(size, 4), 1);
  }
}

TEST(Frontier, EndsAtThePositionsOfTheModelAndTheRoomToStore) {
  ModelShape shape = long_shape();
  shape.max_positions = 3000;
  PlanOptions options = within(std::int64_t{4} << 30, shape);
  Frontier frontier = find_frontier(shape, options, testing::test_profile(), {2}, 200);
  for (const FrontierCell& cell : frontier.cells) {
    EXPECT_EQ(cell.prompt, 2800) << cell.way;
    EXPECT_EQ(cell.limit, FrontierCell::Limit::positions) << cell.way;
  }
  EXPECT_THROW(find_frontier(shape, options, testing::test_profile(), {2}, 3000), OptionError);
  options.spill_room = 1 << 20;
  frontier = find_frontier(shape, options, testing::test_profile(), {2}, 200);
  EXPECT_LT(frontier.cell(0, 4).prompt, 2800);
  EXPECT_EQ(frontier.cell(0, 4).limit, FrontierCell::Limit::spill_room);
  EXPECT_LE(frontier.cell(0, 4).cost.stored_bytes, 1 << 20);
}

TEST(Frontier, WithoutRoomForAnythingNoPromptFits) {
  const ModelShape shape = long_shape();
  const Frontier frontier = find_frontier(shape, within(-1, shape), testing::test_profile(), {2}, 100);
  for (const FrontierCell& cell : frontier.cells) EXPECT_EQ(cell.prompt, 0) << cell.way;
  EXPECT_EQ(frontier.factor(0, 4), 0);
  EXPECT_NE(table_of(frontier).find("phased, offload"), std::string::npos);
}

}  // namespace
}  // namespace espalier
