// Ranks exchange the bytes that the plan predicts, to the byte: by axis and phase.
#include <gtest/gtest.h>

#include <vector>

#include "espalier/data/training_data.h"
#include "espalier/forecast/communication.h"
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
  std::vector<Outcome> runs(static_cast<std::size_t>(degrees.ranks()));
  run_ranks(degrees,
            [&](const Mesh& mesh) { runs[static_cast<std::size_t>(mesh.world.rank())] = run_case(c, dtype, mesh); });
  std::vector<const StepPlan*> plans(static_cast<std::size_t>(degrees.dp));
  for (std::int64_t rank = 0; rank < degrees.ranks(); ++rank)
    plans[static_cast<std::size_t>(place_of(rank, degrees).dp)] = &runs[static_cast<std::size_t>(rank)].report.plan;
  for (std::int64_t rank = 0; rank < degrees.ranks(); ++rank) {
    const LocalShape local(shape_of(c), degrees, place_of(rank, degrees));
    const TrafficBytes& counted = runs[static_cast<std::size_t>(rank)].report.bytes;
    const TrafficBytes planned =
        Communication(local, dtype, kind, default_profile("cpu", dtype, 1)).of(plans, batch).bytes;
    EXPECT_EQ(counted.a, planned.a) << "rank " << rank;
    EXPECT_EQ(counted.b, planned.b) << "rank " << rank;
    EXPECT_EQ(counted.c, planned.c) << "rank " << rank;
    EXPECT_EQ(counted.reduction, planned.reduction) << "rank " << rank;
  }
}

void expect_planned_bytes(const Case& c, const std::vector<Degrees>& layouts, DType dtype = DType::float64,
                          const std::vector<std::int64_t>& budgets = {0, 7}) {
  for (const Plan& plan : all_plans(budgets))
    for (const Degrees& degrees : layouts) {
      SCOPED_TRACE(text_of(text_of_degrees(degrees), ", ", plan.name, ", ", c.family, c.critic ? ", critic" : ""));
      expect_planned_bytes(with(c, plan), degrees, dtype);
    }
}

TEST(CollectiveBytes, AreThoseOfThePlan) {
  for (const char* family : {"qwen3", "llama-bias", "qwen3-moe", "qwen3-moe-sparse", "DeepseekV3"}) {
    Case c = ragged(family);
    expect_planned_bytes(c, {{.tp = 2}, {.tp = 4}, {.dp = 3}, {.tp = 2, .dp = 2}}, DType::float64, {7});
    expect_planned_bytes(c, {{.tp = 2}}, DType::float32);
    expect_planned_bytes(c, {{.tp = 2}}, DType::bfloat16, {7});
    expect_planned_bytes(as_critic(c), {{.tp = 2}}, DType::float64, {7});
    c.options.policy_loss = "gspo";
    expect_planned_bytes(c, {{.tp = 2}}, DType::float64, {7});
  }
}

TEST(CollectiveBytes, OfShardedRowsAndLayersToo) {
  std::vector<Degrees> layouts = {{.cp = 2},          {.tp = 2, .cp = 3}, {.pp = 2},          {.pp = 3},
                                  {.cp = 2, .pp = 2}, {.cp = 2, .dp = 2}, {.pp = 2, .dp = 2}, {.tp = 4, .pp = 2}};
  for (const char* family : {"qwen3", "llama", "qwen3-moe-late", "DeepseekV2", "qwen3-next"})
    for (const char* loss : {"vanilla", "gspo"}) {
      Case c = ragged(family);
      c.options.policy_loss = loss;
      if (c.family == "qwen3-next") layouts.back().tp = 2;  // of its key heads
      if (c.family == "qwen3-moe-late") c.options.router_aux_loss_coef = 0.5;
      expect_planned_bytes(c, layouts, DType::float64, {7});
    }
  expect_planned_bytes(as_critic(ragged("qwen3")), {{.cp = 2}, {.pp = 2}}, DType::float64, {7});
}

// A sharded path: what each event gathers of it and sums, joined ones included; stages have several waves in flight,
// and one of a single layer gathers nothing twice.
TEST(CollectiveBytes, OfAShardedPathToo) {
  Case c = ragged("qwen3");
  c.rollouts.groups = 5, c.rollouts.shared_start = 0.7, c.rollouts.nested_prompt = 0.3;
  c.options.path_state = "divide";
  const std::vector<Degrees> layouts = {{.cp = 2},          {.cp = 3},          {.tp = 2, .cp = 2},
                                        {.cp = 2, .pp = 2}, {.cp = 2, .pp = 3}, {.cp = 2, .dp = 2}};
  for (const char* state : {"keep", "recompute"})
    for (const std::int64_t budget : {3, 6})
      for (const Degrees& degrees : layouts) {
        SCOPED_TRACE(text_of(text_of_degrees(degrees), ", ", state, ", budget ", budget));
        expect_planned_bytes(with(c, {"", "phased", budget, state}), degrees, DType::float64);
      }
  const Case phased = with(c, {"", "phased", 6, "keep"});
  expect_planned_bytes(phased, Degrees{.cp = 3}, DType::bfloat16);
  expect_planned_bytes(phased, Degrees{.cp = 2, .dp = 2, .full = true}, DType::float64);
  expect_planned_bytes(as_critic(phased), Degrees{.cp = 2, .pp = 2}, DType::float64);
  expect_planned_bytes(eleven_waves(), Degrees{.cp = 12}, DType::float64);
  c.family = "qwen3-moe-all";
  for (const Degrees& degrees : {Degrees{.cp = 2, .ep = 2}, {.cp = 4, .ep = 2}, {.cp = 2, .dp = 2, .ep = 4}})
    expect_planned_bytes(with(c, {"", "phased", 6, "keep"}), degrees, DType::float64);
}

// A path of latents: a trunk's latents are gathered once, in any other path once more in the backward.
TEST(CollectiveBytes, OfAPathOfLatentsToo) {
  Case c = ragged("DeepseekV3");
  c.rollouts.groups = 5, c.rollouts.shared_start = 0.7, c.rollouts.nested_prompt = 0.3;
  for (const char* path : {"keep", "divide", "latents", "latents-divide", "latents-offload"})
    for (const char* state : {"keep", "recompute"})
      for (const Degrees& degrees : {Degrees{.cp = 2}, {.cp = 3}, {.tp = 2, .cp = 2}, {.cp = 2, .pp = 2}}) {
        SCOPED_TRACE(text_of(text_of_degrees(degrees), ", ", state, ", path ", path));
        c.options.path_state = path;
        expect_planned_bytes(with(c, {"", "phased", 6, state}), degrees, DType::float64);
      }
}

// Sharded weights: what each event brings together and sums, joined ones included.
TEST(CollectiveBytes, OfShardedWeightsToo) {
  const Degrees two{.dp = 2, .full = true}, five{.dp = 5, .full = true}, four{.tp = 2, .dp = 2, .full = true};
  const Degrees rows{.cp = 2, .dp = 2, .full = true}, stages{.pp = 2, .dp = 2, .full = true};
  for (const char* family : {"qwen3", "llama"}) {
    Case c = ragged(family);
    const Case phased = with(c, {"", "phased", 7, "keep"});
    for (const Degrees& degrees : {five, four, rows, stages}) expect_planned_bytes(phased, degrees, DType::float64);
    expect_planned_bytes(with(c, {"", "dense", 0, "auto"}), two, DType::bfloat16);
    expect_planned_bytes(as_critic(with(c, {"", "packed", 7, "auto"})), two, DType::float64);
    c.options.policy_loss = "gspo";
    expect_planned_bytes(with(c, {"", "phased", 7, "recompute"}), rows, DType::float64);
  }
}

// Bytes of parameters that train: layers below the first of them have no backward, held ones no sum.
TEST(CollectiveBytes, OfHeldParametersToo) {
  const std::vector<Degrees> layouts = {{.tp = 2},
                                        {.dp = 3},
                                        {.cp = 2},
                                        {.pp = 2},
                                        {.pp = 3},
                                        {.tp = 2, .pp = 2, .dp = 2},
                                        {.dp = 2, .full = true},
                                        {.pp = 2, .dp = 2, .full = true}};
  for (const char* words : {"norms", "embeddings", "head", "model[.]layers[.][12][.].*", "model[.]layers[.]2[.].*"})
    for (const char* family : {"qwen3", "llama"}) {
      Case c = ragged(family);
      c.options.train = words;
      for (const char* state : {"keep", "recompute"})
        for (const Degrees& degrees : layouts) {
          SCOPED_TRACE(text_of(text_of_degrees(degrees), ", ", words, ", ", state, ", ", family));
          expect_planned_bytes(with(c, {"", "phased", 7, state}), degrees, DType::float64);
        }
    }
}

// Every row goes to all experts: as evenly as the plan takes them to go. Ranks without rows of their own for an event
// give the counts and what came to their experts.
TEST(CollectiveBytes, OfExpertsTooWhereChoicesAreEven) {
  Case c = ragged("qwen3-moe-all");
  expect_planned_bytes(c, {{.tp = 2, .ep = 2}, {.tp = 4, .ep = 4}, {.dp = 2, .ep = 2}});
  const std::vector<Degrees> mixes = {
      {.dp = 4, .ep = 2},          {.dp = 4, .ep = 4},          {.tp = 2, .dp = 2, .ep = 4}, {.cp = 2, .ep = 2},
      {.cp = 2, .dp = 2, .ep = 4}, {.pp = 2, .dp = 2, .ep = 2}, {.cp = 2, .pp = 2, .ep = 2}};
  expect_planned_bytes(c, mixes, DType::float64, {7});
  c.options.router_aux_loss_coef = 0.5, c.options.router_z_loss_coef = 0.1;
  expect_planned_bytes(c, {{.tp = 2, .ep = 2}, {.dp = 2, .ep = 2}}, DType::float64, {7});
}

}  // namespace
}  // namespace testing
}  // namespace espalier
