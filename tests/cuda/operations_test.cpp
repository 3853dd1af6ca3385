// Every operation of the emulated kernels: the CPU's answer in float64 at all sizes and in all dtypes, and the same
// bits in whatever order the threads run.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <utility>
#include <vector>

#include "espalier/base/error.h"
#include "espalier/mixers/attention/shape.h"
#include "espalier/mixers/attention/wide_work.h"
#include "espalier/mixers/delta_rule/shape.h"
#include "espalier/mixers/recurrence/gpu_work.h"
#include "espalier/ops/cuda/chunk_trial.h"
#include "espalier/ops/cuda/device.h"
#include "espalier/ops/cuda/launch.h"
#include "espalier/ops/cuda/operations.h"
#include "espalier/ops/cuda/runtime.h"
#include "espalier/program/step_kind.h"
#include "espalier/selftest/operation_check.h"
#include "espalier/shape/model_shape.h"
#include "tests/cuda/emulated_runtime.h"
#include "tests/cuda/emulation.h"
#include "tests/cuda/kernel_checks.h"

namespace espalier::testing {
namespace {

const std::vector<KernelCheck>& all_checks() {
  static const std::vector<KernelCheck> checks = kernel_checks();
  return checks;
}

void expect_no_problem(KernelCheck::Kind kind, const std::string& group) {
  int checked = 0;
  for (const KernelCheck& check : all_checks()) {
    if (check.kind != kind || check.group != group) continue;
    ++checked;
    std::string problem;
    ASSERT_NO_THROW(problem = check.problem()) << check.name;
    EXPECT_EQ(problem, "") << check.name;
  }
  EXPECT_GT(checked, 0);
}

class EmulatedOperations : public ::testing::TestWithParam<const char*> {};

TEST_P(EmulatedOperations, GiveTheAnswerOfTheCpuInFloat64) { expect_no_problem(KernelCheck::Kind::answer, GetParam()); }

TEST_P(EmulatedOperations, HaveTheSameBitsInEveryOrderOfThreads) {
  expect_no_problem(KernelCheck::Kind::orders, GetParam());
}

TEST(ChunkedDeltaRule, LosesNoMoreThanTwoBfloat16Do) { expect_no_problem(KernelCheck::Kind::answer, "Chunks"); }

TEST(MergedAttention, IsThatOfAllKeys) { expect_no_problem(KernelCheck::Kind::answer, "Merging"); }

TEST(TiledAttention, TakesTheInstructionsOfItsFormulaAndMeetsNoBankTwice) {
  expect_no_problem(KernelCheck::Kind::instructions, "Formula");
}

TEST(TiledAttention, LeavesOutTilesThatNobodySees) { expect_no_problem(KernelCheck::Kind::instructions, "Unseen"); }

// So that a kernel that reads it gives another result, or goes astray.
TEST(DeviceMemory, IsNoNumberAndNoPlaceUntilItIsWritten) {
  const cuda::Scratch<std::int32_t> memory(2);
  const auto first = [&]<class T>(T value) {
    cuda::copy_to_host(&value, memory.get(), sizeof(T));
    return value;
  };
  EXPECT_EQ(first(std::int32_t{0}), std::numeric_limits<std::int32_t>::max());
  EXPECT_GT(first(std::int64_t{0}), std::int64_t{1} << 40);
  EXPECT_TRUE(std::isnan(first(0.0)));
  EXPECT_TRUE(std::isnan(first(0.f)));
  EXPECT_TRUE(std::isnan(static_cast<float>(first(bfloat16()))));
}

// A launch that asks for more shared memory than a block has is a fault. All architectures launch what the smallest one
// launches.
TEST(Architectures, TheOneWithTheLeastSharedMemoryTakesTheAttentionOfLargeHeads) {
  const emulation::Architecture usual = emulation::architecture();
  emulation::set_architecture(
      *std::ranges::min_element(emulation::kArchitectures, {}, &emulation::Architecture::shared_bytes));
  int checked = 0;
  for (const OperationCase& each : attention_cases()) {
    if (each.sizes.find(" heads of 192") == std::string::npos && each.sizes.find(" heads of 256") == std::string::npos)
      continue;
    ++checked;
    OperationCheck check;
    ASSERT_NO_THROW(check = check_operation(emulated_device(), each, DType::bfloat16)) << each.sizes;
    EXPECT_TRUE(check.pass()) << check.operation << ", " << check.sizes;
  }
  EXPECT_GE(checked, 4);
  emulation::set_architecture(usual);
}

// Before anything is read of a model: its limits, and what it names.
TEST(Models, ThatKernelsDoNotTakeAreRefusedWhenTheyAreOpened) {
  ModelShape taken;
  taken.architecture = "AnyForCausalLM", taken.hidden = 4096, taken.experts = 128;
  AttentionShape attention{.heads = 32, .kv_heads = 8, .head_dim = 128};
  attention.window = 128, attention.soft_cap = 50, attention.sinks = true;
  taken.layer = attention_layers(1, attention, 0);
  const auto refusal = [](const ModelShape& shape, at::ScalarType dtype) -> std::string {
    try {
      emulated_device().operations().require_taken(shape, dtype);
    } catch (const UnsupportedError& error) {
      return error.what();
    }
    return "";
  };
  const auto changed = [&](auto change) {
    ModelShape shape = taken;
    change(shape);
    return shape;
  };
  EXPECT_EQ(refusal(taken, at::kBFloat16), "");
  const auto expect_named = [&](const ModelShape& shape, at::ScalarType dtype, const std::string& what) {
    const std::string said = refusal(shape, dtype);
    EXPECT_NE(said.find(what), std::string::npos) << said;
    EXPECT_NE(said.find("AnyForCausalLM"), std::string::npos) << said;
    EXPECT_NE(said.find("cpu"), std::string::npos) << said;
  };
  const auto wide_heads = [&](ModelShape& s) {
    s.layer = attention_layers(1, {.heads = 32, .kv_heads = 8, .head_dim = 512}, 0);
  };
  EXPECT_EQ(refusal(changed(wide_heads), at::kBFloat16), "");
  expect_named(changed([](ModelShape& s) { s.experts = 2049; }), at::kFloat, "2049");
  const ModelShape wide = changed([](ModelShape& s) { s.hidden = 24576; });
  EXPECT_EQ(refusal(wide, at::kFloat), "");
  expect_named(wide, at::kDouble, "24576");
  const ModelShape rows = changed([&](ModelShape& s) {
    AttentionShape wide_norm = attention;
    wide_norm.wide_norm = true, wide_norm.heads = 200;
    s.layer = attention_layers(1, wide_norm, 0);
  });
  expect_named(rows, at::kFloat, "25600");
  const auto recurrent = [&](std::int64_t key_dim, std::int64_t gate_latent = 0, std::int64_t kernel = 4) {
    RecurrenceShape states;
    states.kernel = kernel, states.key_dim = key_dim, states.gate_latent = gate_latent;
    ModelShape shape = taken;
    shape.layer[0].mixer = std::make_shared<const DeltaRule>(states);
    return shape;
  };
  EXPECT_EQ(refusal(recurrent(128), at::kDouble), "");
  EXPECT_EQ(refusal(recurrent(256), at::kFloat), "");
  expect_named(recurrent(256), at::kDouble, "keys of 256");
  EXPECT_EQ(refusal(recurrent(147, 128), at::kDouble), "");
  EXPECT_EQ(refusal(recurrent(300, 128), at::kFloat), "");
  expect_named(recurrent(300, 128), at::kDouble, "keys of 300");
  expect_named(recurrent(301, 128), at::kFloat, "keys of 301");
  expect_named(recurrent(128, 0, 9), at::kFloat, "at most 8");
}

// Slots of all experts in windows: where experts end is read on the device (bfloat16, as on Hopper). One product after
// the other, as in float32, has to know.
TEST(Experts, AForwardWaitsForNothingWhereProductsAreGrouped) {
  constexpr std::int64_t R = 24, M = 8, F = 8, E = 4, K = 2;
  Device& device = emulated_device();
  const Operations& ops = device.operations();
  for (const at::ScalarType dtype : {at::kBFloat16, at::kFloat}) {
    const auto filled = [&](at::IntArrayRef sizes, at::ScalarType type) {
      return device.adopt(normal(sizes.vec(), 1).to(type));
    };
    const ExpertWeights weights{filled({E, 2 * F, M}, dtype), filled({E, M, F}, dtype)};
    const at::Tensor x = filled({R, M}, dtype), sum = filled({R, M}, at::kFloat), weight = filled({R, K}, at::kFloat),
                     gate_up = filled({R * K, 2 * F}, dtype);
    const ExpertScratch scratch{filled({R, M}, dtype), filled({R, F}, dtype), {}, {}};
    const SortedSlots sorted{device.allocate({E + 1}, at::kInt), device.allocate({R * K}, at::kInt),
                             device.allocate({R * K}, at::kInt)};
    ops.sort_by_expert(device.adopt((at::arange(R * K) % E).to(at::kInt).view({R, K})), sorted);
    const std::int64_t before = host_waits();
    ops.add_experts(sorted, weights, x, weight, gate_up, sum, scratch);
    EXPECT_EQ(host_waits() - before, dtype == at::kFloat ? 1 : 0);
    device.synchronize();
  }
}

// Scratch memory is given back when somebody waits, so all of a call is held behind it.
TEST(WideHeads, TakeTheScratchThatThePlanCounts) {
  Device& device = emulated_device();
  constexpr std::int64_t T = 40, P = 50, H = 2, D = 320;
  const Attention mixer({.heads = H, .kv_heads = 1, .head_dim = D});
  const DeviceTraits traits{.attention = AttentionKernels::own};
  for (const std::int64_t most : {std::int64_t{1} << 30, std::int64_t{40} << 10})
    for (const DType dtype : {DType::float32, DType::bfloat16})
      for (const bool gradients : {false, true}) {
        const std::int64_t usual = std::exchange(WideRoom::most_bytes, most);
        const auto rows = [&](std::int64_t count, std::int64_t width, bool sums = false) {
          const bool narrow = dtype == DType::bfloat16 && !sums;
          return device.adopt(at::zeros({count, width}, narrow ? at::kBFloat16 : at::kFloat));
        };
        const AttentionProblem problem{
            D,          rows(T, H * D), rows(T, D), rows(T, D),
            rows(P, D), rows(P, D),     {},         device.adopt(at::full({T}, T, at::kInt))};
        const at::Tensor out = rows(T, H * D), lse = rows(H, T, true), grad_q = rows(T, H * D);
        const AttentionGradients grads{grad_q, rows(T, D, true), rows(T, D, true), rows(P, D, true), rows(P, D, true)};
        device.synchronize();
        const std::int64_t before = cuda::held_memory();
        if (gradients)
          device.operations().add_attention_backward(problem, out, lse, out, grads);
        else
          device.operations().attention(problem, out, lse);
        const std::int64_t taken = cuda::held_memory() - before;
        const std::int64_t counted = mixer.gpu_scratch({traits, dtype, T, P, 1, gradients}).given_back;
        device.synchronize();
        WideRoom::most_bytes = usual;
        EXPECT_LE(taken, counted + 6 * 4096);  // whole pages
        EXPECT_GE(static_cast<double>(taken), 0.98 * static_cast<double>(counted)) << gradients << name_of(dtype);
      }
}

TEST(RecurrentLayers, TakeTheScratchThatThePlanCounts) {
  Device& device = emulated_device();
  RecurrenceShape heads, channels, mamba;
  heads.key_heads = 1, heads.value_heads = 2, heads.key_dim = 16, heads.value_dim = 24, heads.kernel = 4;
  channels = heads, channels.key_heads = 2, channels.gate_latent = 8;
  mamba = heads, mamba.mamba = mamba.conv_bias = true;
  std::vector<std::int64_t> one_is_long(16, 1);
  one_is_long.back() = 640;
  const std::vector<std::int64_t> one_run = {300}, all_alike(16, 65);
  struct Case {
    RecurrenceShape shape;
    DType dtype;
    std::vector<std::int64_t> lengths;
    bool in_chunks = false, backward = true;
  };
  std::vector<Case> cases;
  for (const RecurrenceShape& shape : {heads, channels, mamba})
    for (const std::vector<std::int64_t>& lengths : {one_run, all_alike, one_is_long})
      cases.push_back({shape, DType::float32, lengths});
  for (const RecurrenceShape& shape : {heads, channels})
    cases.push_back({shape, DType::bfloat16, all_alike});  // a trial failed
  heads.value_heads = 1;  // chunks on tensor cores: emulation takes a second for each four
  cases.push_back({heads, DType::bfloat16, all_alike, true});
  cases.push_back({mamba, DType::bfloat16, one_run, true});
  channels.key_heads = channels.value_heads = 1;
  cases.push_back({channels, DType::bfloat16, std::vector<std::int64_t>(16, 2), true});
  cases.push_back({channels, DType::bfloat16, all_alike, true, false});
  for (const Case& each : cases) {
    const RecurrenceShape& s = each.shape;
    const DType dtype = each.dtype;
    const std::vector<std::int64_t>& lengths = each.lengths;
    cuda::trust_chunks(each.in_chunks);
    const std::int64_t T = std::reduce(lengths.begin(), lengths.end());
    const at::ScalarType stored = dtype == DType::float32 ? at::kFloat : at::kBFloat16;
    const auto of_type = [&](const std::vector<std::int64_t>& sizes, at::ScalarType type) {
      return device.adopt(at::zeros(sizes, type));
    };
    const auto zeros = [&](const std::vector<std::int64_t>& sizes) { return of_type(sizes, stored); };
    const auto state = [&] { return of_type({s.state()}, at::kFloat); };
    std::vector<StateRun> runs;
    std::int64_t row = 0;
    for (const std::int64_t length : lengths) {
      const std::int64_t begin = std::exchange(row, row + length);
      runs.push_back({begin, row, state(), {}, state(), {}, false});
    }
    const at::Tensor per_head = zeros({s.value_heads}), per_channel = zeros({s.channels()});
    const DeltaRuleProblem problem{s,
                                   zeros({T, s.projected()}),
                                   zeros({s.channels(), s.kernel}),
                                   per_head,
                                   zeros({s.decays()}),
                                   s.conv_bias ? per_channel : at::Tensor(),
                                   s.mamba ? per_head : at::Tensor(),
                                   runs};
    const at::Tensor grad_o = zeros({T, s.value_width()}), grad_projected = zeros({T, s.projected()});
    for (const bool gradients : {true, false}) {
      if (gradients && !each.backward) continue;
      device.synchronize();
      const std::int64_t before = cuda::held_memory();
      if (gradients)
        device.operations().add_delta_rule_backward(problem, grad_o, {grad_projected, {}, {}, {}, {}, {}});
      else
        device.operations().delta_rule(problem, grad_o);
      const std::int64_t taken = cuda::held_memory() - before,
                         counted = each.in_chunks ? chunk_scratch_bytes(s, T, gradients)
                                                  : row_scratch_bytes(s, T, dtype, gradients);
      device.synchronize();
      EXPECT_EQ(cuda::held_memory(), before);
      EXPECT_GE(recurrent_scratch_bytes(s, T, dtype, gradients), counted);
      EXPECT_LE(taken, counted + 4 * 4096) << T;                    // whole pages
      if (lengths.size() == 16 && (gradients || lengths[0] > 2)) {  // short runs take none in the forward
        EXPECT_GE(static_cast<double>(taken), 0.99 * static_cast<double>(counted)) << T;
      }
    }
  }
  cuda::trust_chunks(true);
}

// The bounds are the same as for any device.
TEST(TheCpuItself, GivesItsAnswersInFloat64) {
  for (const OperationCase& each : all_operation_cases())
    for (const DType dtype : {DType::float64, DType::float32, DType::bfloat16}) {
      const OperationCheck check = check_operation(cpu_device(), each, dtype);
      EXPECT_TRUE(check.pass()) << check.operation << ", " << check.sizes << ", " << name_of(dtype) << ": off by "
                                << check.error << ", allowed " << check.allowed;
    }
}

INSTANTIATE_TEST_SUITE_P(Rows, EmulatedOperations, ::testing::Values("Rows"));
INSTANTIATE_TEST_SUITE_P(Moving, EmulatedOperations, ::testing::Values("Moving"));
INSTANTIATE_TEST_SUITE_P(Products, EmulatedOperations, ::testing::Values("Products"));
INSTANTIATE_TEST_SUITE_P(Attention, EmulatedOperations, ::testing::Values("Attention"));
INSTANTIATE_TEST_SUITE_P(Head, EmulatedOperations, ::testing::Values("Head"));
INSTANTIATE_TEST_SUITE_P(Experts, EmulatedOperations, ::testing::Values("Experts"));
INSTANTIATE_TEST_SUITE_P(Optimizer, EmulatedOperations, ::testing::Values("Optimizer"));
INSTANTIATE_TEST_SUITE_P(States, EmulatedOperations, ::testing::Values("States"));
INSTANTIATE_TEST_SUITE_P(Variants, EmulatedOperations, ::testing::Values("Variants"));

TEST(ChunkTrial, ChunksThatAgreeWithRowsAreTrusted) {
  Device& device = emulated_device();
  cuda::trust_chunks(false);
  EXPECT_EQ(cuda::try_chunks(device), "");
  EXPECT_TRUE(cuda::trusts_chunks());
}

TEST(ChunkTrial, ChunksThatDifferAreNotUsed) {
  static Operations wrong = emulated_device().operations();
  wrong.delta_rule = [](const DeltaRuleProblem& problem, const at::Tensor& o_TV) {
    cuda::operations().delta_rule(problem, o_TV);
    if (cuda::trusts_chunks() && problem.shape.decays_channels()) cuda::operations().scale(o_TV, 1.02);
  };
  static cuda::CudaDevice device(wrong, "wrong");
  const std::string found = cuda::try_chunks(device);
  EXPECT_NE(found.find("decays of channels: outputs differ by "), std::string::npos) << found;
  EXPECT_FALSE(cuda::trusts_chunks());
  cuda::trust_chunks(true);
}

}  // namespace
}  // namespace espalier::testing
