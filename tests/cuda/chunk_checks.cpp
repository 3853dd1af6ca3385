// Gradients of the chunked delta rule (espalier/ops/cuda/delta_chunks.h) against the CPU's float64, within what tensor
// cores lose of numbers that are two bfloat16: far less than one bfloat16 would lose.
// The bound is error_of_chunks (espalier/ops/cuda/chunk_trial.h), and 2^-8 of each number that is rounded to bfloat16.
#include <ATen/core/Tensor.h>

#include <algorithm>
#include <utility>

#include "espalier/base/error.h"
#include "espalier/ops/cuda/chunk_trial.h"
#include "espalier/ops/cuda/delta_chunks.h"
#include "espalier/ops/cuda/delta_passes.h"
#include "espalier/selftest/operation_check.h"
#include "tests/cuda/emulated_runtime.h"
#include "tests/cuda/emulation.h"
#include "tests/cuda/kernel_checks.h"

namespace espalier::testing {
namespace {

constexpr const char* kOperation = "add_delta_rule_backward";
constexpr const char* kNames[] = {"projected rows", "the convolution",      "a_log", "dt_bias",
                                  "biases",         "the factor of values", "states"};
constexpr bool kOfDecays[] = {false, false, true, true, false, false, false};

// Holds launches to the shared memory of a block that all GPUs have, while it lives.
class LeastSharedMemory {
 public:
  LeastSharedMemory() {
    emulation::set_architecture(
        *std::ranges::min_element(emulation::kArchitectures, {}, &emulation::Architecture::shared_bytes));
  }
  ~LeastSharedMemory() { emulation::set_architecture(usual_); }
  LeastSharedMemory(const LeastSharedMemory&) = delete;
  LeastSharedMemory& operator=(const LeastSharedMemory&) = delete;

 private:
  emulation::Architecture usual_ = emulation::architecture();
};

std::string problem_of(const OperationCase& each, std::vector<at::Tensor>& answer) {
  constexpr std::int64_t kMostChunks = 5;  // of a path: runs of 130, 2 and 5 rows
  const double of_products = cuda::error_of_chunks(kMostChunks);
  const LeastSharedMemory of_a_block;
  emulation::set_seed(1);
  emulation::reset_counters();
  const std::vector<at::Tensor> results = results_on(emulated_device(), each, DType::bfloat16);
  if (emulation::counter("mma") == 0) return "no tensor cores";
  if (emulation::counter("bank conflicts") != 0) return "a bank of shared memory is met twice";
  if (answer.empty()) answer = answer_of_cpu(each, DType::bfloat16);
  for (std::size_t i = 0; i < results.size(); ++i) {
    const at::Tensor got = results[i].to(at::kDouble), want = answer[i].to(at::kDouble);
    const double allowed = of_products * (kOfDecays[i] ? cuda::kErrorOfDecays : 1) * want.abs().max().item<double>();
    const at::Tensor beyond = (got - want).abs() - want.abs() * (i == 0 ? 0x1p-8 : 0);
    const double most = beyond.max().item<double>();
    if (!(most <= allowed)) return text_of(kNames[i], " off by ", most, ", allowed ", allowed);
  }
  return "";
}

// One pass for all key heads and a pass for each have bitwise identical results.
std::string problem_of_passes(const OperationCase& each) {
  emulation::set_seed(1);
  const std::vector<at::Tensor> together = results_on(emulated_device(), each, DType::bfloat16);
  cuda::set_pass_bytes(1);
  const std::vector<at::Tensor> apart = results_on(emulated_device(), each, DType::bfloat16);
  cuda::set_pass_bytes(cuda::kMostPassBytes);
  return same_bits(together, apart) ? "" : "other bits where key heads have passes of their own";
}

RecurrenceShape small_shape(bool channels, bool mamba, std::int64_t key_dim = 20) {
  RecurrenceShape s;
  s.key_heads = s.value_heads = 1, s.key_dim = key_dim, s.value_dim = 12, s.kernel = 3;
  s.gate_latent = channels ? 1 : 0, s.mamba = mamba;
  return s;
}

// The outputs of rows depend neither on other runs of the call nor on rows behind them.
std::string problem_of_calls(const RecurrenceShape& s) {
  constexpr std::int64_t kFirst = 90, kCut = 75, kRows = 110;  // rows of one run, of its begin, of two
  Device& device = emulated_device();
  const LeastSharedMemory of_a_block;
  emulation::set_seed(1);
  const auto there = [&](const std::vector<std::int64_t>& sizes, std::uint64_t seed) {
    return device.adopt(normal(sizes, seed).to(at::kBFloat16));
  };
  DeltaRuleProblem problem{s,
                           there({kRows, s.projected()}, 170),
                           there({s.channels(), s.kernel}, 171),
                           there({1}, 172),
                           there({s.decays()}, 173),
                           {},
                           s.mamba ? there({1}, 174) : at::Tensor(),
                           {}};
  const auto outputs = [&](const std::vector<std::pair<std::int64_t, std::int64_t>>& rows) {
    std::vector<StateRun> runs;
    for (const auto& [begin, end] : rows) runs.push_back({begin, end, {}, {}, {}, {}, false});
    problem.runs = runs;
    const at::Tensor o_TV = there({kRows, s.value_width()}, 175);
    device.operations().delta_rule(problem, o_TV);
    return device.to_host(o_TV);
  };
  const at::Tensor all = outputs({{0, kFirst}, {kFirst, kRows}});
  for (const auto& [begin, end] : {std::pair{std::int64_t{0}, kCut}, std::pair{kFirst, kRows}})
    if (!all.slice(0, begin, end).equal(outputs({{begin, end}}).slice(0, begin, end)))
      return text_of("other bits of rows ", begin, " to ", end, " in a call of their own");
  return "";
}

}  // namespace

void add_chunk_checks(std::vector<KernelCheck>& checks) {
  const auto add_calls = [&](const char* name, const RecurrenceShape& shape) {
    checks.push_back(
        {KernelCheck::Kind::answer, "Chunks", text_of("calls: ", name), [=] { return problem_of_calls(shape); }});
  };
  add_calls("decays of heads", small_shape(false, false));
  add_calls("decays of channels", small_shape(true, false));
  add_calls("Mamba-2", small_shape(false, true));
  add_calls("heads of 100", small_shape(false, false, 100));
  for (OperationCase& moved : state_cases()) {
    const auto has = [&](const char* words) { return moved.sizes.find(words) != std::string::npos; };
    const bool backward = moved.operation == kOperation;
    if ((!backward && moved.operation != "delta_rule") || has("held") || has("dropped")) continue;
    const bool of_heads = has("all heads") || has("Mamba-2, a tree") || has("channels, a tree");
    const auto each = std::make_shared<const OperationCase>(std::move(moved));
    if (of_heads)
      checks.push_back({KernelCheck::Kind::answer, "Chunks", text_of("passes: ", each->operation, ", ", each->sizes),
                        [=] { return problem_of_passes(*each); }});
    if (!backward) continue;
    const auto answer = std::make_shared<std::vector<at::Tensor>>();
    checks.push_back({KernelCheck::Kind::answer, "Chunks", text_of("two bfloat16, ", each->sizes),
                      [=] { return problem_of(*each, *answer); }});
  }
}

}  // namespace espalier::testing
