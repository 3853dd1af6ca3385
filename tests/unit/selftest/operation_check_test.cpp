// `selftest` notices an operation that is wrong, one that answers another time with other bits, and no others.
#include "espalier/selftest/operation_check.h"

#include <ATen/core/Tensor.h>
#include <gtest/gtest.h>

#include "espalier/ops/cpu/operations.h"

namespace espalier {
namespace {

// The worst of the cases of an operation on a device that runs these operations.
OperationCheck worst(const Operations& operations, const std::string& operation, DType dtype) {
  const std::unique_ptr<Device> device = cpu::device_with(operations);
  OperationCheck found;
  bool any = false;
  for (const OperationCase& each : row_cases()) {
    if (each.operation != operation) continue;
    const OperationCheck check = check_operation(*device, each, dtype);
    if (!any || !check.pass()) found = check;
    any = true;
  }
  EXPECT_TRUE(any) << operation;
  return found;
}

TEST(OperationCheck, TheProcessorsOwnOperationsPass) {
  for (const DType dtype : {DType::float32, DType::bfloat16})
    EXPECT_TRUE(worst(cpu::operations(), "norm", dtype).pass());
}

TEST(OperationCheck, AWrongOperationFails) {
  Operations wrong = cpu::operations();
  wrong.norm = [](const at::Tensor& x, const NormWeights& weights, double eps, const at::Tensor& out,
                  const at::Tensor& rstd) { cpu::operations().norm(x, weights, eps * 1000, out, rstd); };
  const OperationCheck check = worst(wrong, "norm", DType::float32);
  EXPECT_FALSE(check.pass());
  EXPECT_GT(check.error, check.allowed);
}

TEST(OperationCheck, OtherBitsTheSecondTimeFail) {
  Operations changing = cpu::operations();
  changing.norm = [](const at::Tensor& x, const NormWeights& weights, double eps, const at::Tensor& out,
                     const at::Tensor& rstd) {
    static int calls = 0;
    cpu::operations().norm(x, weights, eps, out, rstd);
    if (++calls % 2 == 0 && out.numel() > 0) out.view({-1})[0] *= 1 + 1e-7;  // one unit in the last place of float32
  };
  const OperationCheck check = worst(changing, "norm", DType::float32);
  EXPECT_FALSE(check.same_bits);
  EXPECT_FALSE(check.pass());
}

}  // namespace
}  // namespace espalier
