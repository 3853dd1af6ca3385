// The guarded device catches what it is there for: a host that touches its memory, memory freed before the work on it
// has run, and it runs work in order, late, with the values of the call.
#include "tests/device/guarded_device.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/zeros.h>
#include <gtest/gtest.h>

#include <csignal>
#include <cstring>
#include <vector>

#include "espalier/device/arena.h"
#include "espalier/device/control_block.h"
#include "espalier/device/host_values.h"
#include "espalier/ops/cpu/operations.h"

namespace espalier::testing {
namespace {

const Operations& ops() { return guarded_device().operations(); }

at::Tensor on_device(const at::Tensor& host) { return guarded_device().adopt(host); }

class GuardedDeathTest : public ::testing::Test {
 protected:
  void SetUp() override { GTEST_FLAG_SET(death_test_style, "threadsafe"); }
};

// An operation that is left out would be the CPU's, which runs at once and faults on its first tensor.
TEST(Guarded, EveryOperationRunsLate) {
  using Word = void*;
  const auto words = [](const Operations& operations) {
    std::vector<Word> out(sizeof(Operations) / sizeof(Word));
    std::memcpy(out.data(), &operations, sizeof(Operations));
    return out;
  };
  const Operations &cpu = cpu::operations(), &late = ops();
  const auto place = [&](const auto& member) {
    return static_cast<std::size_t>(reinterpret_cast<const char*>(&member) - reinterpret_cast<const char*>(&cpu)) /
           sizeof(Word);
  };
  const std::vector<Word> ours = words(late), theirs = words(cpu);
  for (std::size_t i = 0; i < ours.size(); ++i) {
    if (i == place(cpu.writes_sums) || i == place(cpu.rounds_weight_gradients) || i == place(cpu.require_taken) ||
        i == place(cpu.adds_in_turn) || i == place(cpu.without_chunks))
      continue;  // which touch no tensor
    EXPECT_NE(ours[i], theirs[i]) << "the operation number " << i << " of the table is the CPU's";
  }
}

TEST(Guarded, WorkRunsLateAndInOrderAndCopiesBringItsResults) {
  const at::Tensor x = on_device(at::arange(6, at::kFloat)), y = guarded_device().allocate({6}, at::kFloat);
  guarded_device().synchronize();
  const std::int64_t before = guarded_device().operations_run();
  ops().convert(x, y);
  ops().zero(x);
  EXPECT_EQ(guarded_device().operations_run(), before);
  EXPECT_TRUE(guarded_device().to_host(y).equal(at::arange(6, at::kFloat)));
  EXPECT_TRUE(guarded_device().to_host(x).equal(at::zeros({6}, at::kFloat)));
  EXPECT_EQ(guarded_device().operations_run(), before + 2);
}

TEST(Guarded, WhatIsHandedOverIsThatOfTheCall) {
  std::vector<std::int32_t> rows{2, 0};
  at::Tensor row_R;
  ControlBlock block;
  block.add(rows, row_R);
  block.hand_over(guarded_device());
  const at::Tensor table = on_device(at::arange(6, at::kDouble).view({3, 2}));
  const at::Tensor x = guarded_device().allocate({2, 2}, at::kDouble);
  ops().gather(table, row_R, x);
  rows = {1, 1};  // later than the call, before the work
  EXPECT_TRUE(guarded_device().to_host(x).equal(at::tensor({4.0, 5.0, 0.0, 1.0}, at::kDouble).view({2, 2})));
}

TEST(Guarded, TensorsDroppedAfterTheCallLiveUntilTheWorkHasRun) {
  const at::Tensor y = guarded_device().allocate({3}, at::kFloat);
  {
    Arena arena(1 << 16, guarded_device());
    const at::Tensor scratch = arena.take({3}, at::kFloat);
    ops().convert(on_device(at::ones({3})), scratch);
    ops().convert(scratch, y);
  }  // the arena waits for the work
  EXPECT_TRUE(guarded_device().to_host(y).equal(at::ones({3})));
}

TEST_F(GuardedDeathTest, AHostThatReadsAResultDirectlyIsStopped) {
  EXPECT_EXIT(
      {
        const at::Tensor y = guarded_device().allocate({3}, at::kFloat);
        ops().zero(y);
        guarded_device().synchronize();
        const volatile float seen = host_values<float>(y)[0];
        (void)seen;
      },
      ::testing::KilledBySignal(SIGSEGV), "");
}

TEST_F(GuardedDeathTest, AHostThatWritesAnArgumentDirectlyIsStopped) {
  EXPECT_EXIT(
      {
        Arena arena(1 << 16, guarded_device());
        arena.take({3}, at::kFloat).zero_();
      },
      ::testing::KilledBySignal(SIGSEGV), "");
}

TEST_F(GuardedDeathTest, AnArgumentFreedBeforeItsWorkIsFound) {
  EXPECT_EXIT(
      {
        std::byte* const memory = guarded_device().reserve(1 << 16);
        const at::Tensor x = guarded_device().view(memory, {3}, at::kFloat);
        ops().zero(x);
        guarded_device().release_early(memory, 1 << 16);
        guarded_device().synchronize();
      },
      ::testing::KilledBySignal(SIGSEGV), "");
}

}  // namespace
}  // namespace espalier::testing
