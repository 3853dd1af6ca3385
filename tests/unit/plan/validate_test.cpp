// A plan that breaks one rule is refused, whatever the rule.
#include <gtest/gtest.h>

#include <functional>

#include "espalier/base/error.h"
#include "tests/unit/plan/shapes.h"

namespace espalier {
namespace {

using testing::group_of;
using testing::planned;

// Trunk of 39 rows (a chain of two), two waves below.
class Validate : public ::testing::Test {
 protected:
  Validate() : batch(group_of(40, 12, 4)) {
    PlanOptions options;
    options.schedule = Schedule::phased;
    options.token_budget = 30;
    plan = planned(batch, options);
  }

  void expect_refused(const char* what, const std::function<void(StepPlan&)>& change) {
    StepPlan broken = plan;
    change(broken);
    EXPECT_THROW(validate(broken, batch), InternalError) << what;
  }
  static PlanItem& inner(StepPlan& plan) { return plan.items[0].below[0]; }
  static PlanItem& wave(StepPlan& plan) { return inner(plan).below[0]; }

  std::vector<Rollout> batch;
  StepPlan plan;
};

TEST_F(Validate, AcceptsThePlan) {
  ASSERT_EQ(plan.trunks, 2);
  ASSERT_EQ(plan.waves, 2);
  EXPECT_NO_THROW(validate(plan, batch));
}

TEST_F(Validate, RefusesEachBrokenRule) {
  expect_refused("a lost wave", [](StepPlan& p) { inner(p).below.pop_back(); });
  expect_refused("a wave twice", [](StepPlan& p) { inner(p).below.push_back(inner(p).below[0]); });
  expect_refused("a trunk with nothing below", [](StepPlan& p) { inner(p).below.clear(); });
  expect_refused("a wrong path", [](StepPlan& p) { wave(p).path_rows -= 1; });
  expect_refused("no repeated fork token",
                 [](StepPlan& p) { wave(p).set.segments.erase(wave(p).set.segments.begin()); });
  expect_refused("a subtree too short", [](StepPlan& p) { wave(p).set.segments[0].subtree_end -= 1; });
  expect_refused("a subtree too long", [](StepPlan& p) { wave(p).set.segments[1].subtree_end += 1; });
  expect_refused("a multiplicity", [](StepPlan& p) { wave(p).set.segments[0].multiplicity += 1; });
  expect_refused("a foreign rollout", [](StepPlan& p) { std::swap(wave(p).set.rollouts[0], wave(p).set.rollouts[1]); });
  expect_refused("a depth", [](StepPlan& p) { wave(p).set.segments[1].begin += 1, wave(p).set.segments[1].end += 1; });
  expect_refused("a gap", [](StepPlan& p) { wave(p).set.segments[1].row += 1; });
  expect_refused("not finished", [](StepPlan& p) { wave(p).finished.pop_back(); });
  expect_refused("finished twice", [](StepPlan& p) { p.items[0].finished.push_back(0); });
  expect_refused("outputs", [](StepPlan& p) { wave(p).set.outputs += 1; });
  expect_refused("pairs", [](StepPlan& p) { wave(p).set.pairs += 1; });
  expect_refused("output pairs", [](StepPlan& p) { wave(p).set.output_pairs += 1; });
  expect_refused("above the budget", [](StepPlan& p) { p.token_budget = 10; });
  expect_refused("trunk rows", [](StepPlan& p) { p.trunk_rows += 1; });
  expect_refused("wave rows", [](StepPlan& p) { p.wave_rows += 1; });
  expect_refused("logical rows", [](StepPlan& p) { p.logical_rows += 1; });
  expect_refused("waves", [](StepPlan& p) { p.waves += 1; });
  expect_refused("longest path", [](StepPlan& p) { p.max_path_rows += 1; });
  expect_refused("a tree's rows", [](StepPlan& p) { p.trees[0].physical_rows += 1; });
  expect_refused("edges of masked tokens", [this](StepPlan&) { batch[0].loss_mask[11] = 0; });
}

TEST_F(Validate, RefusesSharedRowsWithDifferentTokens) {
  batch[1].prompt_ids[7] += 1;
  EXPECT_THROW(validate(plan, batch), InternalError);
}

TEST_F(Validate, RefusesAPlanForOtherRollouts) {
  batch.push_back(batch[0]);
  EXPECT_THROW(validate(plan, batch), InternalError);
}

}  // namespace
}  // namespace espalier
