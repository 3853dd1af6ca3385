// Every operation of the emulated kernels: the CPU's answer in float64 at all sizes and in all dtypes, and the same
// bits in whatever order the threads run.
#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include "espalier/prove/operation_check.h"
#include "tests/cuda/emulated_runtime.h"
#include "tests/cuda/emulation.h"

namespace espalier::testing {
namespace {

bool same_bits(const at::Tensor& a, const at::Tensor& b) {
  return a.equal(b) || a.view(at::kLong).equal(b.view(at::kLong));
}

class EmulatedOperations : public ::testing::TestWithParam<std::vector<OperationCase> (*)()> {};

TEST_P(EmulatedOperations, GiveTheAnswerOfTheCpuInFloat64) {
  emulation::set_seed(1);
  for (const OperationCase& each : GetParam()())
    for (const DType dtype : {DType::float64, DType::float32, DType::bfloat16}) {
      const OperationCheck check = check_operation(emulated_device(), each, dtype);
      EXPECT_TRUE(check.pass()) << check.operation << ", " << check.sizes << ", " << name_of(dtype) << ": off by "
                                << check.error << ", allowed " << check.allowed;
    }
}

TEST_P(EmulatedOperations, HaveTheSameBitsInEveryOrderOfThreads) {
  for (const OperationCase& each : GetParam()())
    for (const DType dtype : {DType::float32, DType::bfloat16}) {
      emulation::set_seed(0);
      const std::vector<at::Tensor> forward = results_on(emulated_device(), each, dtype);
      for (const unsigned seed : {1u, 2u, 3u}) {
        emulation::set_seed(seed);
        const std::vector<at::Tensor> again = results_on(emulated_device(), each, dtype);
        for (std::size_t i = 0; i < forward.size(); ++i)
          EXPECT_TRUE(same_bits(forward[i], again[i]))
              << each.operation << ", " << each.sizes << ", result " << i << ", seed " << seed;
      }
    }
}

// Products of [m, k] and [k, n] on tensor cores: a matrix instruction for every 16 x 8 x 16.
std::int64_t instructions(std::int64_t products, std::int64_t m, std::int64_t n, std::int64_t k) {
  return products * m * n * k / (16 * 8 * 16);
}

TEST(TiledAttention, TakesTheInstructionsOfItsFormulaAndMeetsNoBankTwice) {
  constexpr std::int64_t T = 64, P = 128, H = 2, J = 1, D = 64;
  const auto rows = [](std::int64_t count, std::int64_t heads) {
    return emulated_device().adopt(normal({count, heads * D}, 1).to(at::kBFloat16));
  };
  const auto sums = [](std::int64_t count) { return emulated_device().adopt(at::zeros({count, J * D}, at::kFloat)); };
  const at::Tensor ends = emulated_device().adopt(at::full({T}, T, at::kInt));
  const AttentionProblem problem{D, rows(T, H), rows(T, J), rows(T, J), rows(P, J), rows(P, J), at::Tensor(), ends};
  const at::Tensor out = rows(T, H), lse = emulated_device().adopt(at::zeros({H, T}, at::kFloat));
  const Operations& ops = emulated_device().operations();
  emulation::set_seed(1);
  emulation::reset_counters();
  ops.attention(problem, out, lse);
  emulated_device().synchronize();
  EXPECT_EQ(emulation::counter("mma"), H * instructions(2, T, P + T, D));
  emulation::reset_counters();
  ops.add_attention_backward(problem, out, lse, rows(T, H), {rows(T, H), sums(T), sums(T), sums(P), sums(P)});
  emulated_device().synchronize();
  // S and dP twice, dV, dK, dQ.
  EXPECT_EQ(emulation::counter("mma"), H * instructions(7, T, P + T, D));
  EXPECT_GT(emulation::counter("ldmatrix"), 0);
  EXPECT_EQ(emulation::counter("bank conflicts"), 0);
}

// A group of three: each own tile of the second and third is seen by no row of the others, and left out.
TEST(TiledAttention, LeavesOutTilesThatNobodySees) {
  constexpr std::int64_t N = 3, T = N * 64, D = 64;
  std::vector<std::int32_t> ends;
  for (std::int64_t i = 0; i < T; ++i) ends.push_back(static_cast<std::int32_t>((i / 64 + 1) * 64));
  const auto rows = [] { return emulated_device().adopt(normal({T, D}, 1).to(at::kBFloat16)); };
  const at::Tensor none = rows().narrow(0, 0, 0);
  const AttentionProblem problem{D,    rows(), rows(),       rows(),
                                 none, none,   at::Tensor(), emulated_device().adopt(whole_numbers(ends))};
  emulation::reset_counters();
  emulated_device().operations().attention(problem, rows(), emulated_device().adopt(at::zeros({1, T}, at::kFloat)));
  emulated_device().synchronize();
  EXPECT_EQ(emulation::counter("mma"), instructions(2, 64, 64, D) * N);
}

// The bounds are those of any device.
TEST(TheCpuItself, GivesItsAnswersInFloat64) {
  for (const OperationCase& each : all_operation_cases())
    for (const DType dtype : {DType::float64, DType::float32, DType::bfloat16}) {
      const OperationCheck check = check_operation(cpu_device(), each, dtype);
      EXPECT_TRUE(check.pass()) << check.operation << ", " << check.sizes << ", " << name_of(dtype) << ": off by "
                                << check.error << ", allowed " << check.allowed;
    }
}

INSTANTIATE_TEST_SUITE_P(Rows, EmulatedOperations, ::testing::Values(row_cases));
INSTANTIATE_TEST_SUITE_P(Moving, EmulatedOperations, ::testing::Values(moving_cases));
INSTANTIATE_TEST_SUITE_P(Products, EmulatedOperations, ::testing::Values(product_cases));
INSTANTIATE_TEST_SUITE_P(Attention, EmulatedOperations, ::testing::Values(attention_cases));
INSTANTIATE_TEST_SUITE_P(Head, EmulatedOperations, ::testing::Values(head_cases));
INSTANTIATE_TEST_SUITE_P(Experts, EmulatedOperations, ::testing::Values(expert_cases));
INSTANTIATE_TEST_SUITE_P(Optimizer, EmulatedOperations, ::testing::Values(optimizer_cases));

}  // namespace
}  // namespace espalier::testing
