// A path carried as latents (--path-state latents) in every family with latent attention: the gradient of autograd, the
// log-probs of a dense plan bit for bit, and the bytes that were predicted.
#include <gtest/gtest.h>

#include <cmath>

#include "espalier/base/error.h"
#include "espalier/shape/path_leaves.h"
#include "tests/equivalence/fixture.h"
#include "tests/support/layers.h"
#include "tests/with_products.h"

namespace espalier::testing {
namespace {

std::vector<std::string> families_with_latents() {
  std::vector<std::string> out;
  for (const std::string& family : families_of_table())
    if (narrows_path(tiny_shape(family))) out.push_back(family);
  return out;
}

const LayerShape& layer_of_latents(const ModelShape& shape) {
  return *std::ranges::find_if(shape.layer, [](const LayerShape& layer) { return layer.mixer->narrows_path(); });
}

Case latents_of(const std::string& family) {
  Case c;
  c.family = family;
  c.rollouts = ragged_rollouts();
  c.options.path_state = "latents";
  return c;
}

void expect_gradient(const Case& c, const OracleResult& exact) {
  const Outcome run = run_case(c);
  const Worst worst = worst_parameter(c, run.gradient, exact.gradient);
  EXPECT_LE(worst.error, kFloat64) << worst.parameter;
  EXPECT_NEAR(run.loss, exact.loss, kFloat64 * std::max(1.0, std::abs(exact.loss)));
}

// `most_above`: of adapters of the latents' projection, a room that the plan adds to every phase. A wave without a
// trunk above it runs while no layer of an offloaded path is in memory, and the plan counts one.
void expect_predicted(const Case& c, DType dtype, std::int64_t most_above) {
  const GradientReport report = run_case(c, dtype).report;
  const PhasePeaks predicted = predicted_arena_bytes(c, report.plan, dtype), &taken = report.arena_bytes;
  const ModelShape shape = shape_of(c);
  const PathBuffers layer({{shape, element_bytes(dtype), false}, layer_of_latents(shape)}, report.plan.max_path_rows,
                          true, true);
  for (const auto& [name, phase] : {std::pair("A", &PhasePeaks::a), {"B", &PhasePeaks::b}, {"C", &PhasePeaks::c}}) {
    const bool may_sleep = phase == &PhasePeaks::b && report.plan.path.sleeps();
    EXPECT_LE(taken.*phase, predicted.*phase) << "phase " << name;
    EXPECT_GE(taken.*phase, predicted.*phase - most_above - (may_sleep ? layer.peak() : 0)) << "phase " << name;
  }
}

class PathLatents : public ::testing::TestWithParam<std::string> {};

TEST_P(PathLatents, EveryPlanEqualsAutograd) {
  for (const bool critic : {false, true}) {
    Case c = latents_of(GetParam());
    c.critic = c.rollouts.values = critic;
    const OracleResult exact = run_oracle(c);
    for (const Plan& plan : all_plans({1, 7})) {
      SCOPED_TRACE(text_of(plan.name, critic ? ", critic" : ""));
      expect_gradient(with(c, plan), exact);
    }
  }
  const Case c = latents_of(GetParam());
  EXPECT_EQ(run_case(with(c, {"", "phased", 7, "keep"})).report.plan.path.state(), PathState::latents);
  EXPECT_EQ(run_case(with(c, {"", "dense", 0, "keep"})).report.plan.path.state(), PathState::keep) << "there is none";
}

// Blocks of the path are expanded one after another: here there are two.
TEST_P(PathLatents, LongPathsToo) {
  Case c = latents_of(GetParam());
  c.rollouts.groups = 1;
  c.rollouts.group_size = {2, 2};
  c.rollouts.prompt_length = {1060, 1060};
  c = with(c, {"", "phased", 64, "keep"});
  EXPECT_GT(run_case(c).report.plan.max_path_rows, 1024);
  expect_gradient(c, run_oracle(c));
}

TEST_P(PathLatents, StatesGiveTheBitsOfKeptState) {
  Case c = with(latents_of(GetParam()), {"", "phased", 7, "keep"});
  c.options.wave_state = "keep";
  const at::Tensor kept = run_case(c).gradient;
  for (const char* trunks : {"recompute", "offload"})
    for (const char* waves : {"keep", "recompute"}) {
      SCOPED_TRACE(text_of("trunks ", trunks, ", waves ", waves));
      for (const char* path : {"latents", "latents-offload"}) {
        c.options.trunk_state = trunks, c.options.wave_state = waves, c.options.path_state = path;
        EXPECT_TRUE(at::equal(run_case(c).gradient, kept)) << path;
      }
    }
}

// The store holds latents: of a model whose heads are wider than these, fewer bytes than keys and values.
TEST_P(PathLatents, AreWhatTheStoreHolds) {
  Case c = with(latents_of(GetParam()), {"", "phased", 7, "keep"});
  const auto stored = [&](const char* path) {
    c.options.path_state = path;
    const StepPlan plan = run_case(c, DType::float32).report.plan;
    EXPECT_EQ(plan.path.state(), c.options.path_state);
    const ModelShape shape = tiny_shape(GetParam());
    std::int64_t pages = 0, widths = 0;  // values and sums in 4 bytes each, every buffer begins at a page
    for (const PathKind& kind : layer_of_latents(shape).mixer->path_kinds(plan.path.latents)) {
      pages += 2 * ((plan.max_path_rows * kind.width * 4 + 4095) / 4096);
      widths += kind.width;
    }
    EXPECT_EQ(plan.chosen.path_stored_bytes, (shape.layers() - recurrent_before(shape, shape.layers())) * pages * 4096)
        << path;
    return widths;
  };
  EXPECT_LT(stored("latents-offload"), stored("offload"));
}

TEST_P(PathLatents, LogProbsHaveTheBitsOfADensePlan) {
  const WithProducts own(true);
  for (const DType dtype : {DType::float64, DType::float32, DType::bfloat16}) {
    Case c = latents_of(GetParam());
    c.rollouts.policy = PolicyAge::none;
    const Outcome dense = run_case(with(c, {"", "dense", 0, "keep"}), dtype);
    for (const char* const state : {"keep", "recompute"})
      expect_same_bits(run_case(with(c, {"", "phased", 7, state}), dtype), dense);
  }
}

TEST_P(PathLatents, AdaptersHaveTheGradientOfTheChainRule) {
  Case c = latents_of(GetParam());
  c.options.lora_rank = 3, c.options.lora_alpha = 7, c.options.lora_target = "all-linear";
  if (!takes_additions(tiny_shape(GetParam()))) {
    EXPECT_THROW(run_case(c), UnsupportedError);
    return;
  }
  const OracleResult exact = run_oracle(c);
  for (const Plan& plan : all_plans({7})) {
    SCOPED_TRACE(plan.name);
    expect_gradient(with(c, plan), exact);
  }
}

TEST_P(PathLatents, TakeTheBytesThatWerePredicted) {
  for (const bool adapters : {false, true})
    for (std::uint64_t seed = 1; seed <= 3; ++seed)
      for (const Plan& plan : all_plans({0, 17}))
        for (const DType dtype : {DType::float32, DType::float64, DType::bfloat16}) {
          if (adapters && !takes_additions(tiny_shape(GetParam()))) continue;
          SCOPED_TRACE(text_of("seed ", seed, ", ", plan.name, ", ", name_of(dtype), adapters ? ", adapters" : ""));
          Case c = with(latents_of(GetParam()), plan);
          c.seed = seed;
          if (adapters) c.options.lora_rank = 3, c.options.lora_target = "all-linear";
          for (const char* path : {"latents", "latents-offload"}) {
            SCOPED_TRACE(path);
            c.options.path_state = path;
            expect_predicted(c, dtype, adapters ? 1024 * 3 * 8 + 4096 : 0);
          }
        }
}

// Layers below the first one that trains have no gradients.
TEST_P(PathLatents, AreNotSummedWhereNothingTrains) {
  Case c = with(latents_of(GetParam()), {"", "phased", 7, "keep"});
  c.options.train = "norms";
  expect_gradient(c, run_oracle(c));
  expect_predicted(c, DType::float32, 0);
}
INSTANTIATE_TEST_SUITE_P(Models, PathLatents, ::testing::ValuesIn(families_with_latents()),
                         [](const auto& info) { return name_of_family(info.param); });

TEST(PathLatentsOfOthers, AreRefusedForOtherAttention) {
  Case c = latents_of("qwen3");
  c.options.schedule = "phased";
  for (const char* path : {"latents", "latents-offload", "latents-divide"}) {
    c.options.path_state = path;
    try {
      run_case(c);
      ADD_FAILURE() << path;
    } catch (const UnsupportedError& refused) {
      EXPECT_NE(std::string(refused.what()).find(text_of("--path-state ", path)), std::string::npos);
    }
  }
}

}  // namespace
}  // namespace espalier::testing
