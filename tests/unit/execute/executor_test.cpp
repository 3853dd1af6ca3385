// The executor by itself: every item runs forward and backward once, the gradient is the slope of the loss whatever the
// plan, and an error leaves nothing behind.
#include "espalier/execute/stage.h"

#include <ATen/Context.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/allclose.h>
#include <ATen/ops/randn_like.h>
#include <gtest/gtest.h>

#include <array>
#include <cmath>

#include "tests/support/in_process.h"
#include "tests/unit/execute/small_step.h"

namespace espalier::testing {
namespace {

std::int64_t count_loss_tokens(const std::vector<Rollout>& rollouts) {
  std::int64_t count = 0;
  for (const Rollout& rollout : rollouts) count += std::ranges::count(rollout.loss_mask, 1);
  return count;
}

TEST(Executor, ScoresEveryEdgeOnceUnderEveryPlan) {
  for (const Plan& plan : all_plans({0, 2, 7})) {
    SCOPED_TRACE(plan.name);
    SmallStep step(with(ragged("qwen3"), plan));
    PlainHead head;
    const RunResult result = step.run(head, true);
    EXPECT_EQ(std::ssize(head.times_scored), count_loss_tokens(step.rollouts));
    for (const auto& [edge, times] : head.times_scored) EXPECT_EQ(times, 1) << edge.first << ", " << edge.second;
    EXPECT_EQ(result.trunk_rows, step.plan.trunk_rows);
    EXPECT_EQ(result.wave_rows, step.plan.wave_rows);
    EXPECT_EQ(result.trunk_forwards, step.plan.trunks);
    std::int64_t items = 0;
    visit_items(step.plan.items, [&](const PlanItem&) { ++items; });
    EXPECT_EQ(head.items, items);
  }
}

TEST(Executor, GivesTheSameGradientUnderEveryPlan) {
  const Case c = nested_trunks();
  SmallStep dense(with(c, {"", "dense", 0, "auto"}));
  PlainHead dense_head;
  dense.run(dense_head, true);
  std::int64_t most_trunks = 0;
  for (const Plan& plan : all_plans({2, 7})) {
    SCOPED_TRACE(plan.name);
    SmallStep step(with(c, plan));
    PlainHead head;
    step.run(head, true);
    most_trunks = std::max(most_trunks, step.plan.trunks);
    EXPECT_NEAR(head.loss, dense_head.loss, kFloat64 * std::max(1.0, std::abs(dense_head.loss)));
    const Worst worst = worst_parameter(c, step.gradients.flat(), dense.gradients.flat());
    EXPECT_LE(worst.error, kFloat64) << worst.parameter;
  }
  EXPECT_GE(most_trunks, 3) << "trunks below trunks";
}

// (L(w + h v) - L(w - h v)) / 2h = <dL/dw, v> up to h^2 |L'''| / 6 + 1e-16 |L| / h. With h = 1e-5, L of size 100 and
// derivatives of its size per unit of w (v has length 1), both are below 1e-8 of it.
TEST(Executor, TheGradientIsTheSlopeOfTheLoss) {
  SmallStep step(nested_trunks());
  PlainHead head;
  step.run(head, true);
  const at::Tensor gradient = step.gradients.flat().clone();
  at::manual_seed(7);
  for (int draw = 0; draw < 3; ++draw) {
    at::Tensor direction = at::randn_like(step.model->weights);
    direction /= direction.norm();
    constexpr double kStep = 1e-5;
    const auto loss_at = [&](double h) {
      step.model->weights.add_(direction, h);
      PlainHead moved;
      step.run(moved, false);
      step.model->weights.sub_(direction, h);
      return moved.loss;
    };
    const double slope = (loss_at(kStep) - loss_at(-kStep)) / (2 * kStep);
    const double expected = gradient.dot(direction).item<double>();
    EXPECT_NEAR(slope, expected, 1e-7 * std::max(std::abs(expected), std::abs(head.loss))) << "draw " << draw;
  }
}

TEST(Executor, WithoutGradientsTheForwardIsTheSame) {
  SmallStep step(nested_trunks());
  PlainHead with_gradients, without;
  step.run(with_gradients, true);
  const at::Tensor before = step.gradients.flat().clone();
  const RunResult result = step.run(without, false);
  EXPECT_EQ(without.loss, with_gradients.loss);
  EXPECT_EQ(result.trunk_forwards, step.plan.trunks);
  EXPECT_EQ(result.arena_bytes.c, 0) << "no backward of a trunk";
  EXPECT_TRUE(step.gradients.flat().equal(before));
}

TEST(Executor, ReportsRowsUpToTheWholePlan) {
  SmallStep step(nested_trunks());
  PlainHead head;
  std::vector<std::int64_t> rows;
  step.run(head, true, [&](std::int64_t done) { rows.push_back(done); });
  ASSERT_FALSE(rows.empty());
  EXPECT_TRUE(std::ranges::is_sorted(rows));
  EXPECT_EQ(rows.back(), step.plan.physical_rows());
  EXPECT_EQ(std::ssize(rows), step.plan.waves + 2 * step.plan.trunks) << "a trunk reports in both directions";
}

// At whichever item it comes: trunks are open and a wave has begun.
TEST(Executor, AnErrorGivesTheArenaBackAndTheNextRunIsRight) {
  SmallStep step(nested_trunks());
  PlainHead whole;
  step.run(whole, true);
  const at::Tensor expected = step.gradients.flat().clone();
  for (int item = 1; item <= whole.items; ++item) {
    SCOPED_TRACE(item);
    PlainHead failing;
    failing.fails_at = item;
    EXPECT_THROW(step.run(failing, true), std::runtime_error);
    EXPECT_EQ(step.arena.in_use(), 0);
    PlainHead again;
    step.run(again, true);
    EXPECT_EQ(again.loss, whole.loss);
    EXPECT_TRUE(step.gradients.flat().equal(expected));
  }
}

// One tree, two ranks that meet in layers: the one without rows joins each step and never asks its head. They shard the
// weights, or have half of the experts each.
TEST(Executor, ARankWithoutRowsJoins) {
  for (const bool experts : {false, true}) {
    SCOPED_TRACE(experts ? "experts of other ranks" : "sharded weights");
    const Degrees degrees = experts ? Degrees{.dp = 2, .ep = 2} : Degrees{.dp = 2, .full = true};
    Case c = nested_trunks();
    if (experts) c.family = "qwen3-moe";
    c.rollouts.groups = 1, c.rollouts.group_size = {1, 1};  // nothing that ranks could cut
    SmallStep alone(c);
    PlainHead alone_head;
    alone.run(alone_head, true);
    std::array<double, 2> loss = {};
    std::array<std::int64_t, 2> rows = {}, scored = {};
    run_ranks(degrees, [&](const Mesh& mesh) {
      SmallStep step(c, mesh);
      PlainHead head;
      const RunResult result = step.run(head, true);
      step.gradients.finish_sums();
      const auto rank = static_cast<std::size_t>(mesh.world.rank());
      loss[rank] = head.loss, rows[rank] = result.trunk_rows + result.wave_rows, scored[rank] = head.items;
      EXPECT_GT(experts ? result.bytes.b.ep : result.bytes.b.dp, 0) << "what each gives to the other";
      for (const Parameter& parameter : step.model->table.parameters()) {
        const Kept kept = step.model->table.kept(parameter);
        const at::Tensor own = step.gradients.flat().narrow(0, kept.place, kept.count),
                         whole = parameter_in(alone.gradients.flat(), alone.model->table.at(parameter.name)).view({-1});
        EXPECT_TRUE(at::allclose(own, whole.narrow(0, kept.first, kept.count), kFloat64, kFloat64)) << parameter.name;
      }
    });
    EXPECT_NEAR(loss[0] + loss[1], alone_head.loss, kFloat64 * std::max(1.0, std::abs(alone_head.loss)));
    EXPECT_EQ(std::min(rows[0], rows[1]), 0) << "one tree is one rank's";
    EXPECT_EQ(std::min(scored[0], scored[1]), 0);
    EXPECT_GT(std::max(rows[0], rows[1]), 0);
  }
}

}  // namespace
}  // namespace espalier::testing
