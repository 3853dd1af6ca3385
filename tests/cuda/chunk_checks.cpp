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

using RowsOfRuns = std::vector<std::pair<std::int64_t, std::int64_t>>;

// The outputs of a call with these runs, of `rows` rows in all, or the gradients of their projected rows.
at::Tensor outputs_of(const RecurrenceShape& s, std::int64_t rows, const RowsOfRuns& of_runs, bool backward = false) {
  Device& device = emulated_device();
  const LeastSharedMemory of_a_block;
  emulation::set_seed(1);
  const auto there = [&](const std::vector<std::int64_t>& sizes, std::uint64_t seed) {
    return device.adopt(normal(sizes, seed).to(at::kBFloat16));
  };
  DeltaRuleProblem problem{s,
                           there({rows, s.projected()}, 170),
                           there({s.channels(), s.kernel}, 171),
                           there({s.value_heads}, 172),
                           there({s.decays()}, 173),
                           {},
                           s.mamba ? there({s.value_heads}, 174) : at::Tensor(),
                           {}};
  std::vector<StateRun> runs;
  for (const auto& [begin, end] : of_runs) runs.push_back({begin, end, {}, {}, {}, {}, false});
  problem.runs = runs;
  const at::Tensor o_TV = there({rows, s.value_width()}, 175), grad_TW = there({rows, s.projected()}, 176);
  if (backward)
    device.operations().add_delta_rule_backward(problem, o_TV, {grad_TW, {}, {}, {}, {}, {}});
  else
    device.operations().delta_rule(problem, o_TV);
  return device.to_host(backward ? grad_TW : o_TV);
}

// The outputs of rows depend neither on other runs of the call nor on rows behind them.
std::string problem_of_calls(const RecurrenceShape& s) {
  constexpr std::int64_t kFirst = 90, kCut = 75, kRows = 110;  // rows of one run, of its begin, of two
  const at::Tensor all = outputs_of(s, kRows, {{0, kFirst}, {kFirst, kRows}});
  for (const auto& [begin, end] : {std::pair{std::int64_t{0}, kCut}, std::pair{kFirst, kRows}})
    if (!all.slice(0, begin, end).equal(outputs_of(s, kRows, {{begin, end}}).slice(0, begin, end)))
      return text_of("other bits of rows ", begin, " to ", end, " in a call of their own");
  return "";
}

// As many runs as a launch takes, of a row each.
std::string problem_of_many_runs(const RecurrenceShape& s) {
  constexpr std::int64_t kRows = cuda::kRunsAtOnce;
  RowsOfRuns all;
  for (std::int64_t row = 0; row < kRows; ++row) all.emplace_back(row, row + 1);
  const at::Tensor together = outputs_of(s, kRows, all, true), last = outputs_of(s, kRows, {all.back()}, true);
  return together[kRows - 1].equal(last[kRows - 1]) ? "" : "other bits of the last of many runs";
}

// Three key heads in passes of two and one, in one pass, and in a pass each: the bits, and how many passes there are.
std::string problem_of_uneven_passes() {
  constexpr std::int64_t kRows = 17;
  RecurrenceShape s = small_shape(false, false);
  s.key_heads = s.value_heads = 3;
  cuda::ChunkPass of_head;
  of_head.chunks = of_head.key_heads = of_head.each = of_head.heads = of_head.blocks = 1, of_head.width = 64;
  const std::int64_t bytes = cuda::set_places(of_head, cuda::ChunkUse::outputs, nullptr);
  const auto outputs = [&](std::int64_t pass_bytes) {
    emulation::reset_counters();
    cuda::set_pass_bytes(pass_bytes);
    const at::Tensor o_TV = outputs_of(s, kRows, {{0, kRows}});
    cuda::set_pass_bytes(cuda::kMostPassBytes);
    return std::pair{o_TV, emulation::counter("launches")};
  };
  const auto [together, at_once] = outputs(cuda::kMostPassBytes);
  const auto [by_two, of_two] = outputs(2 * bytes);
  const auto [apart, of_three] = outputs(1);
  if (!together.equal(by_two) || !together.equal(apart)) return "other bits where key heads have several passes";
  return of_two > at_once && of_three - of_two == of_two - at_once ? "" : "other passes than there is memory for";
}

// Heads of up to 128 key channels and 256 value channels are taken in chunks.
std::string problem_of_sizes() {
  constexpr std::int64_t kRows = 16;
  struct Size {
    std::int64_t keys, values;
    bool fits;
  };
  for (const auto& [keys, values, fits] : {Size{128, 256, true}, Size{129, 1, false}, Size{1, 257, false}}) {
    RecurrenceShape s = small_shape(false, false);
    s.key_dim = keys, s.value_dim = values;
    emulation::reset_counters();
    outputs_of(s, kRows, {{0, kRows}});
    if ((emulation::counter("mma") > 0) != fits)
      return text_of("heads of ", keys, " and ", values, fits ? " are not" : " are", " taken in chunks");
  }
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
  checks.push_back({KernelCheck::Kind::answer, "Chunks", "calls: many runs",
                    [] { return problem_of_many_runs(small_shape(false, true)); }});
  checks.push_back(
      {KernelCheck::Kind::answer, "Chunks", "passes: delta_rule, three key heads", problem_of_uneven_passes});
  checks.push_back({KernelCheck::Kind::answer, "Chunks", "calls: the largest heads", problem_of_sizes});
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
