// Attention by the kernels for compute capability 9.0, emulated: the CPU's answer in float64 for the cases of selftest,
// the same bits in every order, no tiles that nobody sees, and which problems they take.
#include <gtest/gtest.h>

#include <string>

#include "espalier/ops/cuda/hopper/attention.h"
#include "espalier/selftest/operation_check.h"
#include "tests/cuda/emulated_runtime.h"
#include "tests/cuda/hopper/hopper_checks.h"
#include "tests/cuda/hopper/twins.h"

namespace espalier::testing {
namespace {

// Orders of every fourth case: they cost three times as much as the answer.
TEST(HopperAttention, GivesTheAnswerOfTheCpuInFloat64WithTheSameBitsInEveryOrder) {
  int checked = 0, orders = 0;
  for (const KernelCheck& check : hopper_checks()) {
    if (check.group != "Hopper" || (check.kind == KernelCheck::Kind::orders && ++orders % 4 != 0)) continue;
    ++checked;
    std::string problem;
    ASSERT_NO_THROW(problem = check.problem()) << check.name;
    EXPECT_EQ(problem, "") << check.name;
  }
  EXPECT_GT(checked, 40);
}

// The same problem on a GPU that holds the blocks that add to the gradients of queries in turn, and on one that holds
// one block less.
TEST(HopperAttention, AddsGradientsOfQueriesInTurnWhereTheGpuHoldsAllBlocks) {
  int checked = 0;
  for (const OperationCase& each : attention_cases()) {
    if (each.operation != "add_attention_backward" || each.sizes != "70 rows, path 300, 4/2 heads of 128") continue;
    ++checked;
    const auto answer = answer_of_cpu(each, DType::bfloat16);
    const auto results_with = [&](unsigned blocks, unsigned seed) {
      const unsigned before = emulation::set_most_together(blocks);
      emulation::set_seed(seed);
      emulation::reset_counters();
      auto results = results_on(emulated_hopper_device(), each, DType::bfloat16);
      emulation::set_most_together(before);
      return results;
    };
    const auto in_turn = results_with(128, 0);
    EXPECT_EQ(emulation::counter("sums in bulk"), 3 * 4 * 2);  // blocks of keys, heads, tiles of queries
    EXPECT_TRUE(compared(each, DType::bfloat16, in_turn, answer).pass());
    for (const unsigned seed : {1u, 2u}) EXPECT_TRUE(same_bits(in_turn, results_with(128, seed))) << seed;
    const auto apart = results_with(127, 1);
    EXPECT_EQ(emulation::counter("sums in bulk"), 0);
    EXPECT_TRUE(compared(each, DType::bfloat16, apart, answer).pass());
  }
  EXPECT_EQ(checked, 1);
}

TEST(HopperAttention, MultipliesTheTilesThatSomeRowSees) {
  for (const KernelCheck& check : hopper_checks()) {
    if (check.group != "HopperTiles") continue;
    std::string problem;
    ASSERT_NO_THROW(problem = check.problem()) << check.name;
    EXPECT_EQ(problem, "") << check.name;
  }
}

TEST(HopperAttention, RunsOnComputeCapability90Alone) {
  for (const int major : {8, 9, 10, 12})
    for (const int minor : {0, 1, 3, 6}) EXPECT_EQ(cuda::hopper::runs_on(major, minor), major == 9 && minor == 0);
}

}  // namespace
}  // namespace espalier::testing
