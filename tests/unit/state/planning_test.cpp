// The memory that a step is planned for where no budget is given: what the device has left, and what this run has of
// it.
#include "espalier/state/planning.h"

#include <gtest/gtest.h>

#include "tests/device/guarded_device.h"
#include "tests/unit/plan/shapes.h"

namespace espalier {
namespace {

constexpr std::int64_t kGiB = std::int64_t{1} << 30;

// A GPU of 80 GiB, 60 of which this run holds: its weights and its optimizer's state.
class LargelyHeld final : public testing::GuardedDevice {
 public:
  std::int64_t free_bytes() override { return 20 * kGiB; }
  std::int64_t held_bytes() override { return 60 * kGiB; }
};

TEST(PlanStep, WithoutABudgetHasAllThatTheRunHoldsOfTheDevice) {
  LargelyHeld gpu;
  bind_device_of_thread(gpu);
  const auto budget = [&](const std::string& given) {
    Options options;
    options.memory_budget = given;
    return plan_step(testing::tiny_shape(), options, testing::test_profile(), testing::group_of(8, 4, 2), false, {}, {})
        .memory_budget;
  };
  EXPECT_EQ(budget(""), 78 * kGiB) << "a tenth of what is free stays free";
  EXPECT_EQ(budget("30GiB"), 30 * kGiB);
  bind_device_of_thread(cpu_device());
}

}  // namespace
}  // namespace espalier
