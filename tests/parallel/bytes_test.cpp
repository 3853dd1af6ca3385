// What ranks give to each other is what the plan says, to the byte: by axis and phase.
#include <gtest/gtest.h>

#include <mutex>

#include "espalier/plan/communication.h"
#include "espalier/train/training_data.h"
#include "tests/parallel/layouts.h"

namespace espalier {

void PrintTo(const AxisBytes& b, std::ostream* out) {
  *out << "tp " << b.tp << ", cp " << b.cp << ", pp " << b.pp << ", dp " << b.dp << ", ep " << b.ep;
}

namespace testing {
namespace {

void expect_planned_bytes(const Case& c, const Degrees& degrees, DType dtype) {
  const TrainingData data(make_rollouts(c.rollouts, c.seed), c.options, c.critic);
  const auto batch = data.mini_batch(0).rollouts;
  const StepKind kind = step_kind_of(c.options, shape_of(c), batch);
  std::mutex one;
  run_ranks(degrees, [&](const Mesh& mesh) {
    const Outcome run = run_case(c, dtype, mesh);
    const LocalShape local(shape_of(c), degrees, mesh.place());
    const TrafficBytes planned =
        Communication(local, dtype, kind, default_profile("cpu", dtype, 1)).of(run.report.plan, batch).bytes;
    const std::lock_guard lock(one);
    const TrafficBytes& counted = run.report.bytes;
    EXPECT_EQ(counted.a, planned.a) << "rank " << mesh.world.rank();
    EXPECT_EQ(counted.b, planned.b) << "rank " << mesh.world.rank();
    EXPECT_EQ(counted.c, planned.c) << "rank " << mesh.world.rank();
    EXPECT_EQ(counted.reduction, planned.reduction) << "rank " << mesh.world.rank();
  });
}

void expect_planned_bytes(const Case& c, const std::vector<Degrees>& layouts, DType dtype = DType::float64) {
  for (const Plan& plan : all_plans({0, 7}))
    for (const Degrees& degrees : layouts) {
      SCOPED_TRACE(text_of(text_of_degrees(degrees), ", ", plan.name, ", ", c.family, c.critic ? ", critic" : ""));
      expect_planned_bytes(with(c, plan), degrees, dtype);
    }
}

TEST(CollectiveBytes, AreThoseOfThePlan) {
  for (const char* family : {"qwen3", "llama-bias", "qwen3-moe", "qwen3-moe-sparse"}) {
    Case c;
    c.family = family;
    c.rollouts = ragged_rollouts();
    expect_planned_bytes(c, {{.tp = 2}, {.tp = 4}, {.dp = 3}, {.tp = 2, .dp = 2}});
    expect_planned_bytes(c, {{.tp = 2}}, DType::float32);
    expect_planned_bytes(c, {{.tp = 2}}, DType::bfloat16);
    expect_planned_bytes(as_critic(c), {{.tp = 2}});
    c.options.policy_loss = "gspo";
    expect_planned_bytes(c, {{.tp = 2}});
  }
}

// Every row goes to all experts: as evenly as the plan takes them to go.
TEST(CollectiveBytes, OfExpertsTooWhereChoicesAreEven) {
  Case c;
  c.family = "qwen3-moe-all";
  c.rollouts = ragged_rollouts();
  expect_planned_bytes(c, {{.tp = 2, .ep = 2}, {.tp = 4, .ep = 4}});
  c.options.router_aux_loss_coef = 0.5, c.options.router_z_loss_coef = 0.1;
  expect_planned_bytes(c, {{.tp = 2, .ep = 2}});
}

}  // namespace
}  // namespace testing
}  // namespace espalier
