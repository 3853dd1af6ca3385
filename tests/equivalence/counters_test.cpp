// Counts of what ran: rows forwarded (the prompt's once), contributions to each accumulator, bytes taken.
#include <gtest/gtest.h>

#include "espalier/base/error.h"
#include "espalier/device/host_values.h"
#include "espalier/model/open_path.h"
#include "espalier/ops/attention/composed.h"
#include "espalier/ops/cpu/operations.h"
#include "tests/equivalence/fixture.h"
#include "tests/support/layers.h"

namespace espalier::testing {
namespace {

Case one_group(std::int64_t prompt, std::int64_t response, std::int64_t n) {
  Case c;
  c.rollouts.groups = 1;
  c.rollouts.group_size = {n, n};
  c.rollouts.prompt_length = {prompt, prompt};
  c.rollouts.response_length = {response, response};
  c.options.share = "prompt";
  return c;
}

// Attention of last blocks: calls with queries at some rows.
int chosen_calls = 0, chosen_in_runs = 0;

// In the last block of a wave, all rows but the last of each response have a query. The problem says that a library may
// take them, and they are worth its calls.
TEST(Counters, TheLastBlockOfAWaveHasQueriesThatALibraryTakes) {
  static const Operations counting = [] {
    Operations changed = cpu::operations();
    changed.attention = [](const AttentionProblem& problem, const at::Tensor& out, const at::Tensor& lse) {
      if (problem.query_row_Q.defined()) {
        const auto rows = host_values<std::int32_t>(problem.query_row_Q);
        const auto ends = host_values<std::int32_t>(problem.subtree_end_T);
        ++chosen_calls;
        if (problem.queries_in_runs && worth_calls(ends, rows)) ++chosen_in_runs;
      }
      cpu::operations().attention(problem, out, lse);
    };
    return changed;
  }();
  static const std::unique_ptr<Device> device = cpu::device_with(counting);
  Device& before = bound_device();
  bind_device(*device);
  chosen_calls = chosen_in_runs = 0;
  Case c = one_group(20, 6, 8);
  c.options.schedule = "phased", c.options.token_budget = 1 + 6 * 4;
  const Outcome run = run_case(c);
  bind_device(before);
  EXPECT_EQ(run.report.plan.waves, 2);
  EXPECT_EQ(chosen_in_runs, run.report.plan.waves);
  EXPECT_EQ(chosen_in_runs, chosen_calls) << "a trunk without outputs has no call";
}

// Items that hang below a trunk, at any depth: each adds once to every layer of the trunk's gradients.
std::int64_t items_below(const PlanItem& trunk) {
  std::int64_t count = 0;
  for (const PlanItem& item : trunk.below) count += 1 + items_below(item);
  return count;
}

TEST(Counters, ThePromptIsForwardedOnceForAnyNumberOfWaves) {
  const std::int64_t prompt = 30, response = 6, n = 8;
  for (const auto& [waves, critic] : {std::pair<std::int64_t, bool>(1, false), {2, false}, {4, true}, {8, false}}) {
    SCOPED_TRACE(text_of(waves, " waves"));
    Case c = one_group(prompt, response, n);
    c.critic = c.rollouts.values = critic;
    c.options.schedule = "phased";
    c.options.token_budget = std::max<std::int64_t>(prompt, 1 + response * n / waves);
    if (waves == 8) c.options.token_budget = 1 + response;
    const Outcome run = run_case(c);
    const GradientReport& r = run.report;
    EXPECT_EQ(r.plan.logical_rows, n * (prompt + response));
    // The trunk leaves its last token to the waves, each of which starts with it.
    EXPECT_EQ(r.trunk_rows, prompt - 1);
    EXPECT_EQ(r.wave_rows, n * response + r.plan.waves);
    EXPECT_EQ(r.trunk_rows + r.wave_rows, r.plan.physical_rows());
    EXPECT_EQ(r.trunk_forwards, r.plan.trunks);
    ASSERT_EQ(r.plan.items.size(), 1u);
    EXPECT_EQ(items_below(r.plan.items[0]), r.plan.trunks - 1 + r.plan.waves);  // a small budget cuts the trunk
    const PhasePeaks predicted = predicted_arena_bytes(c, r.plan, DType::float64);
    EXPECT_EQ(r.arena_bytes.a, predicted.a);
    EXPECT_EQ(r.arena_bytes.b, predicted.b);
    EXPECT_EQ(r.arena_bytes.c, predicted.c);
  }
}

// A run whose count is not the plan's ends with an internal error, so that the runs above had exactly these.
TEST(Counters, ATrunksGradientsAreReadAfterTheLastContributionToTheirLayerAndNotBefore) {
  const ModelShape shape = tiny_shape("qwen3");
  Arena arena(1 << 20);
  OpenPath path(shape, 9, at::kDouble, true, arena);
  const std::int64_t bytes_of_a_row =
      shape.layers() * 4 * attention_of(shape).key_width() * 8;  // k, v and their gradients
  EXPECT_EQ(arena.in_use(), 9 * bytes_of_a_row);
  path.push(5, 4);  // two waves, an inner trunk, and a wave below that
  path.push(4, 1);
  for (std::int64_t layer = 0; layer < shape.layers(); ++layer) {
    EXPECT_THROW(path.expect_complete(layer), InternalError);
    path.count_contribution(layer, 9);  // the innermost wave sees both trunks
    path.expect_complete(layer);
    EXPECT_THROW(path.count_contribution(layer, 9), InternalError) << "one more than the inner trunk was promised";
  }
  path.pop();
  for (std::int64_t layer = 0; layer < shape.layers(); ++layer) {
    // The refused one was counted for the outer trunk, which comes first: two are left to come.
    path.count_contribution(layer, 5);
    EXPECT_THROW(path.expect_complete(layer), InternalError) << "layer " << layer << " has three of four";
    path.count_contribution(layer, 5);
    path.expect_complete(layer);
    EXPECT_THROW(path.count_contribution(layer, 5), InternalError);
  }
}

TEST(Counters, DenseForwardsEveryRowOfEveryRollout) {
  Case c = one_group(30, 6, 8);
  c.options.schedule = "dense";
  const Outcome run = run_case(c);
  EXPECT_EQ(run.report.wave_rows, 8 * 36);
  EXPECT_EQ(run.report.trunk_rows, 0);
  EXPECT_EQ(run.report.trunk_forwards, 0);
  const PhasePeaks predicted = predicted_arena_bytes(c, run.report.plan, DType::float64);
  EXPECT_EQ(run.report.arena_bytes.a, 0);
  EXPECT_EQ(run.report.arena_bytes.b, predicted.b);
  EXPECT_EQ(run.report.arena_bytes.c, 0);
}

// Every moment belongs to one part, and the rest is small beside them.
TEST(Counters, AProfileAddsUpToTheStep) {
  Case c = one_group(30, 6, 8);
  c.options.profile = true;
  for (const Plan& plan : all_plans({0, 9})) {
    const GradientReport report = run_case(with(c, plan)).report;
    ASSERT_TRUE(report.profile.has_value());
    double sum = 0;
    for (const auto& [name, seconds] : report.profile->seconds) {
      EXPECT_GE(seconds, 0) << name;
      sum += seconds;
    }
    EXPECT_NEAR(sum, report.seconds.total, 1e-12);  // rounding of a handful of additions
    EXPECT_GT(report.profile->product_flops_per_second, 0);
  }
  c.options.profile = false;
  EXPECT_FALSE(run_case(c).report.profile.has_value());
}

// Two runs of the same step give the same bits, whatever the plan.
TEST(Counters, TheSameStepGivesTheSameBits) {
  for (const Plan& plan : all_plans({0, 9})) {
    Case c = with(one_group(20, 7, 5), plan);
    for (const DType dtype : {DType::float32, DType::float64})
      EXPECT_TRUE(run_case(c, dtype).gradient.equal(run_case(c, dtype).gradient)) << plan.name;
  }
}

}  // namespace
}  // namespace espalier::testing
