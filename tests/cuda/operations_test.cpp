// Every operation of the emulated kernels: the CPU's answer in float64 at all sizes and in all dtypes, and the same
// bits in whatever order the threads run.
#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include "espalier/ops/cuda/operations.h"
#include "espalier/prove/operation_check.h"
#include "tests/cuda/emulation.h"
#include "tests/device/guarded_device.h"

namespace espalier::testing {
namespace {

Device& emulated_device() {
  guarded_device().run(cuda::operations());
  return guarded_device();
}

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
