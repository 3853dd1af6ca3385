// Gradients of the chunked delta rule (espalier/ops/cuda/delta_chunks.h) against the CPU's float64, within what tensor
// cores lose of numbers that are two bfloat16: far less than one bfloat16 would lose.
//
// A product of such numbers leaves out three terms of at most d = 2^-18 of it each (split_tiles.h). Roundings are of
// either sign and independent, so the roundings of a sum grow as its terms do, and roundings of factors that are sums
// of products add up as squares. A gradient is made from at most 10 products that follow each other (K K^T, four of the
// inverse, its own, three of the scans and the last), and each chunk between it and the row that it comes from adds two
// in either direction. So for paths of c chunks the error of a gradient is at most
//   3 d sqrt(10 + 4 c)
// of the largest gradient; float32 sums of up to 130 terms add 130 2^-24 < 3 d to each factor of 3 d. A decay's
// gradient is the difference of sums over the 64 rows of its chunk, which do not cancel in their errors: sqrt(64) as
// much. A result in bfloat16 is rounded once more, each number by 2^-9 of itself.
#include <ATen/ATen.h>

#include <cmath>

#include "espalier/base/error.h"
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

std::string problem_of(const OperationCase& each, std::vector<at::Tensor>& answer) {
  constexpr std::int64_t kMostChunks = 5;  // of a path: runs of 130, 2 and 5 rows
  const double of_products = 2 * 3 * 0x1p-18 * std::sqrt(10.0 + 4 * kMostChunks);
  emulation::set_seed(1);
  emulation::reset_counters();
  const std::vector<at::Tensor> results = results_on(emulated_device(), each, DType::bfloat16);
  if (emulation::counter("mma") == 0) return "no tensor cores";
  if (emulation::counter("bank conflicts") != 0) return "a bank of shared memory is met twice";
  if (answer.empty()) answer = answer_of_cpu(each, DType::bfloat16);
  for (std::size_t i = 0; i < results.size(); ++i) {
    const at::Tensor got = results[i].to(at::kDouble), want = answer[i].to(at::kDouble);
    const double allowed = of_products * (kOfDecays[i] ? 8 : 1) * want.abs().max().item<double>();
    const at::Tensor beyond = (got - want).abs() - want.abs() * (i == 0 ? 0x1p-8 : 0);
    const double most = beyond.max().item<double>();
    if (!(most <= allowed)) return text_of(kNames[i], " off by ", most, ", allowed ", allowed);
  }
  return "";
}

}  // namespace

void add_chunk_checks(std::vector<KernelCheck>& checks) {
  for (OperationCase& moved : state_cases()) {
    const auto has = [&](const char* words) { return moved.sizes.find(words) != std::string::npos; };
    if (moved.operation != kOperation || has("decays of channels") || has("held") || has("dropped")) continue;
    const auto each = std::make_shared<const OperationCase>(std::move(moved));
    const auto answer = std::make_shared<std::vector<at::Tensor>>();
    checks.push_back({KernelCheck::Kind::answer, "Chunks", text_of("two bfloat16, ", each->sizes),
                      [=] { return problem_of(*each, *answer); }});
  }
}

}  // namespace espalier::testing
