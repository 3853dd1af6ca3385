// How full waves are at ragged lengths, against what first fit decreasing guarantees.
//
// Where no block is above half the capacity, every bin but the last is at least two thirds full: a bin that is less
// full than that takes any block of at most a third. So no bin would be opened after it by such a block; and one of
// more than a third finds room in it as long as it holds only one block of at most a half. With k packings (one below
// each trunk, one for all that may share waves) of w waves together, the mean fill is above 2/3 (w - k) / w.
#include <gtest/gtest.h>

#include "espalier/base/json.h"
#include "espalier/plan/planner.h"
#include "tests/support/make_rollouts.h"
#include "tests/unit/plan/shapes.h"

namespace espalier {
namespace {

using testing::planned;

constexpr std::int64_t kBudget = 512;

std::vector<Rollout> ragged(std::uint64_t seed, std::int64_t longest_prompt, std::int64_t longest_response) {
  testing::RolloutOptions options;
  options.groups = 12;
  options.group_size = {2, 60};
  options.prompt_length = {2, longest_prompt};
  options.response_length = {1, longest_response};
  return testing::make_rollouts(options, seed);
}

StepPlan plan_of(const std::vector<Rollout>& batch, Schedule schedule) {
  PlanOptions options;
  options.schedule = schedule;
  options.token_budget = kBudget;
  return planned(batch, options, ShareMode::prompts);
}

TEST(Fill, WavesBelowTrunksAreAsFullAsFirstFitDecreasingMakesThem) {
  for (std::uint64_t seed = 1; seed <= 20; ++seed) {
    SCOPED_TRACE(seed);
    // A wave below a trunk opens with the fork's row: its capacity is a row less.
    const StepPlan plan = plan_of(ragged(seed, 300, (kBudget - 1) / 2), Schedule::phased);
    ASSERT_EQ(plan.trunks, static_cast<std::int64_t>(plan.trees.size()));
    ASSERT_GT(plan.waves, 4 * plan.trunks);  // else the bound would say little
    EXPECT_GT(to_json(plan).at("fill").get<double>(),
              2.0 / 3 * static_cast<double>(plan.waves - plan.trunks) / static_cast<double>(plan.waves));
  }
}

TEST(Fill, DenseWavesAreAsFullAsFirstFitDecreasingMakesThem) {
  for (std::uint64_t seed = 1; seed <= 20; ++seed) {
    SCOPED_TRACE(seed);
    const StepPlan plan = plan_of(ragged(seed, kBudget / 4, kBudget / 4), Schedule::dense);
    ASSERT_EQ(plan.trunks, 0);
    ASSERT_GT(plan.waves, 20);
    EXPECT_GT(to_json(plan).at("fill").get<double>(),
              2.0 / 3 * static_cast<double>(plan.waves - 1) / static_cast<double>(plan.waves));
  }
}

// One wave of 300 rows and one of 100, of 400; a path that passes a soft budget counts as full.
TEST(Fill, IsTheMeanOverWavesOfRowsOverBudget) {
  StepPlan plan;
  plan.token_budget = 400;
  PlanItem trunk, wave;
  trunk.kind = ItemKind::trunk, trunk.set.rows = 1000;
  wave.set.rows = 300;
  trunk.below.push_back(wave);
  wave.set.rows = 100;
  plan.items = {trunk, wave};
  plan.waves = 2;
  EXPECT_DOUBLE_EQ(to_json(plan).at("fill").get<double>(), 0.5);
  wave.set.rows = 900;
  plan.items.push_back(wave);
  plan.waves = 3;
  EXPECT_DOUBLE_EQ(to_json(plan).at("fill").get<double>(), 2.0 / 3);
  EXPECT_NE(explain(plan).find("67% full on average"), std::string::npos);
}

}  // namespace
}  // namespace espalier
