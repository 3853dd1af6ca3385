// The arena bytes that the planner predicts for a step, phase by phase, against the bytes taken: equal to the byte.
#include <gtest/gtest.h>

#include "espalier/base/error.h"
#include "tests/equivalence/fixture.h"

namespace espalier::testing {
namespace {

void expect_predicted(const Case& c, DType dtype) {
  const GradientReport report = run_case(c, dtype).report;
  const PhasePeaks predicted = predicted_arena_bytes(c, report.plan, dtype), &taken = report.arena_bytes;
  for (const auto& [name, phase] : {std::pair("A", &PhasePeaks::a), {"B", &PhasePeaks::b}, {"C", &PhasePeaks::c}})
    EXPECT_EQ(taken.*phase, predicted.*phase) << "phase " << name;
}

// Where rollouts of several temperatures meet in one row, that row has an output for each.
Case drawn_step(std::uint64_t seed) {
  Case c;
  c.seed = seed;
  c.rollouts = any_options(seed);
  c.rollouts.temperature_low = seed % 2 == 0 ? 0.5 : 1, c.rollouts.temperature_high = 1;
  c.rollouts.rewards = true, c.rollouts.token_advantages = false;
  const char* families[] = {"qwen3", "llama", "llama-bias", "qwen2"};
  c.family = families[seed % 4];
  return c;
}

TEST(Memory, TheArenaTakesWhatWasPredictedOnEveryPlan) {
  for (std::uint64_t seed = 1; seed <= 8; ++seed)
    for (const Plan& plan : all_plans({0, 4, 17}))
      for (const DType dtype : {DType::float32, DType::float64}) {
        SCOPED_TRACE(text_of("seed ", seed, ", ", plan.name, ", ", name_of(dtype)));
        expect_predicted(with(drawn_step(seed), plan), dtype);
      }
}

// A critic's head takes nothing, and a row has one value whatever temperatures meet in it.
TEST(Memory, ACriticTakesWhatWasPredicted) {
  for (std::uint64_t seed = 1; seed <= 6; ++seed)
    for (const Plan& plan : all_plans({0, 4, 17}))
      for (const DType dtype : {DType::float32, DType::float64, DType::bfloat16}) {
        SCOPED_TRACE(text_of("seed ", seed, ", ", plan.name, ", ", name_of(dtype)));
        Case c = with(drawn_step(seed), plan);
        c.critic = c.rollouts.values = true;
        c.rollouts.temperature_low = 0.5;
        expect_predicted(c, dtype);
      }
}

TEST(Memory, LossesOfWholeRolloutsKeepTheHeadForTheBackward) {
  for (std::uint64_t seed = 1; seed <= 4; ++seed)
    for (const Plan& plan : all_plans({0, 9})) {
      SCOPED_TRACE(text_of("seed ", seed, ", ", plan.name));
      Case c = with(drawn_step(seed), plan);
      c.options.policy_loss = "gspo";
      expect_predicted(c, DType::float32);
    }
}

// States that trunks leave, and those that rows of a set leave for others of it.
TEST(Memory, StatesAtForksTakeWhatWasPredicted) {
  for (const char* family : {"qwen3-next", "qwen3-next-last", "qwen3-next-all", "qwen3-next-moe", "Bamba",
                             "GraniteMoeHybrid", "NemotronH", "Lfm2"})
    for (std::uint64_t seed = 1; seed <= 4; ++seed)
      for (const Plan& plan : all_plans({0, 4, 17}))
        for (const DType dtype : {DType::float32, DType::float64, DType::bfloat16}) {
          SCOPED_TRACE(text_of(family, ", seed ", seed, ", ", plan.name, ", ", name_of(dtype)));
          Case c = with(drawn_step(seed), plan);
          c.family = family;
          expect_predicted(c, dtype);
        }
}

// Rows that later layers read, and inputs of layers: held by an item until its backward ends.
TEST(Memory, RowsThatLaterLayersReadTakeWhatWasPredicted) {
  for (const char* family : {"gemma4-reads", "Gemma4"})
    for (std::uint64_t seed = 1; seed <= 3; ++seed)
      for (const Plan& plan : all_plans({0, 4, 17}))
        for (const DType dtype : {DType::float32, DType::bfloat16}) {
          SCOPED_TRACE(text_of(family, ", seed ", seed, ", ", plan.name, ", ", name_of(dtype)));
          Case c = with(drawn_step(seed), plan);
          c.family = family;
          expect_predicted(c, dtype);
        }
}

// Results of experts and of MLPs beside them, each saved before its norm.
TEST(Memory, ExpertsApartTakeWhatWasPredicted) {
  for (std::uint64_t seed = 1; seed <= 4; ++seed)
    for (const Plan& plan : all_plans({0, 4, 17}))
      for (const DType dtype : {DType::float32, DType::float64, DType::bfloat16}) {
        SCOPED_TRACE(text_of("seed ", seed, ", ", plan.name, ", ", name_of(dtype)));
        Case c = with(drawn_step(seed), plan);
        c.family = "gemma4-moe";
        expect_predicted(c, dtype);
      }
}

// Heads of keys and values of two sizes, and latents of queries or none.
TEST(Memory, LatentsTakeWhatWasPredicted) {
  for (const char* family : {"DeepseekV2", "DeepseekV3"})
    for (std::uint64_t seed = 1; seed <= 4; ++seed)
      for (const Plan& plan : all_plans({0, 4, 17}))
        for (const DType dtype : {DType::float32, DType::float64, DType::bfloat16}) {
          SCOPED_TRACE(text_of(family, ", seed ", seed, ", ", plan.name, ", ", name_of(dtype)));
          Case c = with(drawn_step(seed), plan);
          c.family = family;
          expect_predicted(c, dtype);
        }
}

// Whatever the routing: an expert's scratch is that of all rows. A router loss takes all rows through a last layer of
// experts.
TEST(Memory, ExpertLayersTakeWhatWasPredicted) {
  struct Routers {
    double aux, z;
    const char* scope;
  };
  std::uint64_t seed = 0;
  for (const char* family : {"qwen3-moe", "qwen3-moe-sparse", "qwen3-moe-late", "qwen3-moe-many", "qwen3-moe-ties"})
    for (const Routers& routers : {Routers{0, 0, "rollout"}, {0.1, 0, "rollout"}, {0.1, 0.1, "minibatch"}})
      for (const Plan& plan : all_plans({0, 9}))
        for (const DType dtype : {DType::float32, DType::float64, DType::bfloat16}) {
          Case c = with(drawn_step(1 + ++seed % 11), plan);
          c.family = family;
          c.options.router_aux_loss_coef = routers.aux, c.options.router_z_loss_coef = routers.z;
          c.options.router_aux_loss_scope = routers.scope;
          SCOPED_TRACE(
              text_of(family, ", aux ", routers.aux, ", seed ", c.seed, ", ", plan.name, ", ", name_of(dtype)));
          expect_predicted(c, dtype);
        }
}

TEST(Memory, Bfloat16RoundsWeightGradientsInATensorOfTheirOwn) {
  for (std::uint64_t seed = 1; seed <= 3; ++seed)
    for (const Plan& plan : all_plans({0, 9})) {
      SCOPED_TRACE(text_of("seed ", seed, ", ", plan.name));
      expect_predicted(with(drawn_step(seed), plan), DType::bfloat16);
    }
}

}  // namespace
}  // namespace espalier::testing
