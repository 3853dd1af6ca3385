#include "espalier/ops/cuda/chunk_trial.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/sin.h>
#include <ATen/ops/zeros.h>

#include <atomic>
#include <cmath>
#include <vector>

#include "espalier/base/error.h"
#include "espalier/ops/operations.h"

namespace espalier::cuda {
namespace {

std::atomic<bool> trusted = false;

// A prompt of more than a chunk, and two responses that begin with its state, one of them shorter than a chunk's least.
constexpr std::int64_t kRows = 150, kFork = 80, kShort = 90;
constexpr double kChunks = 4;  // of a path

struct Trial {
  const char* name;
  RecurrenceShape shape;
};
std::vector<Trial> trials() {
  RecurrenceShape heads;
  heads.key_heads = 1, heads.value_heads = 2, heads.key_dim = 40, heads.value_dim = 48, heads.kernel = 4;
  RecurrenceShape channels = heads, mamba = heads;
  channels.key_heads = 2, channels.gate_latent = 1;
  mamba.mamba = mamba.conv_bias = true;
  return {{"the delta rule", heads}, {"the delta rule with decays of channels", channels}, {"Mamba-2", mamba}};
}

// Numbers between -size and size that look like no order.
at::Tensor numbers(at::IntArrayRef sizes, double phase, double size) {
  const auto count = c10::multiply_integers(sizes);
  return (size * at::sin(at::arange(static_cast<double>(count), at::kDouble) * 12.9898 + phase)).view(sizes);
}

struct Result {
  const char* name;
  at::Tensor values;     // on the host, float64
  double rounding = 0;   // of each number by itself
  double sensitive = 1;  // kErrorOfDecays for decays
};

std::vector<Result> results_of(Device& device, const RecurrenceShape& shape) {
  const auto there = [&](const at::Tensor& host, at::ScalarType dtype) { return device.adopt(host.to(dtype)); };
  const auto rows = [&](at::IntArrayRef sizes, double phase, double size = 1) {
    return there(numbers(sizes, phase, size), at::kBFloat16);
  };
  const auto zeros = [&](at::IntArrayRef sizes, at::ScalarType dtype = at::kFloat) {
    return there(at::zeros(sizes, at::kDouble), dtype);
  };
  const std::int64_t H = shape.value_heads, C = shape.channels(), N = shape.state(), W = shape.projected();
  DeltaRuleProblem p{
      shape, rows({kRows, W}, 1), rows({C, shape.kernel}, 2, 0.5), rows({H}, 3), rows({shape.decays()}, 4), {}, {}, {}};
  if (shape.mamba) p.conv_bias_C = rows({C}, 5, 0.1), p.skip_H = rows({H}, 6);
  std::vector<StateRun> runs(3);
  runs[0].end = runs[1].begin = kFork, runs[1].end = runs[2].begin = kShort, runs[2].end = kRows;
  runs[0].forks = true, runs[0].end_N = zeros({N}), runs[0].grad_end_N = zeros({N});
  for (StateRun* const run : {&runs[1], &runs[2]})
    run->start_N = runs[0].end_N, run->grad_start_N = runs[0].grad_end_N, run->end_N = zeros({N});
  p.runs = runs;

  const at::Tensor o_TV = zeros({kRows, shape.value_width()}, at::kBFloat16);
  device.operations().delta_rule(p, o_TV);
  const DeltaRuleGradients gradients{zeros({kRows, W}, at::kBFloat16),
                                     zeros({C, shape.kernel}),
                                     zeros({H}),
                                     zeros({shape.decays()}),
                                     shape.mamba ? zeros({C}) : at::Tensor(),
                                     shape.mamba ? zeros({H}) : at::Tensor()};
  device.operations().add_delta_rule_backward(p, rows({kRows, shape.value_width()}, 7), gradients);

  constexpr double kOfBfloat16 = 0x1p-7;  // two roundings to the nearest of 8 bits
  std::vector<Result> out;
  const auto add = [&](const char* name, const at::Tensor& x, double rounding = 0, double sensitive = 1) {
    if (x.defined()) out.push_back({name, device.to_host(x).to(at::kDouble), rounding, sensitive});
  };
  add("outputs", o_TV, kOfBfloat16);
  for (const StateRun& run : runs) add("states", run.end_N);
  add("gradients of states", runs[0].grad_end_N);
  add("gradients of projected rows", gradients.projected_TW, kOfBfloat16);
  add("gradients of the convolution", gradients.conv_CK);
  add("gradients of biases", gradients.conv_bias_C);
  add("gradients of a_log", gradients.a_log_H, 0, kErrorOfDecays);
  add("gradients of dt_bias", gradients.dt_bias_H, 0, kErrorOfDecays);
  add("gradients of the factor of values", gradients.skip_H);
  return out;
}

std::string difference(const std::vector<Result>& got, const std::vector<Result>& want) {
  const double of_products = error_of_chunks(kChunks);
  for (std::size_t i = 0; i < got.size(); ++i) {
    const Result &g = got[i], &w = want[i];
    const double largest = w.values.abs().max().item<double>(), allowed = of_products * w.sensitive * largest;
    const double most = ((g.values - w.values).abs() - w.rounding * w.values.abs()).max().item<double>();
    if (!(most <= allowed)) return text_of(w.name, " differ by ", most, " beyond rounding, ", allowed, " is allowed");
  }
  return "";
}

}  // namespace

bool trusts_chunks() { return trusted; }
void trust_chunks(bool trust) { trusted = trust; }

double error_of_chunks(double chunks) { return 2 * 3 * 0x1p-18 * std::sqrt(10 + 4 * chunks); }

std::string try_chunks(Device& device) {
  for (const auto& [name, shape] : trials()) {
    trust_chunks(false);
    const std::vector<Result> by_rows = results_of(device, shape);
    trust_chunks(true);
    const std::string found = difference(results_of(device, shape), by_rows);
    if (found.empty()) continue;
    trust_chunks(false);
    return text_of(name, ": ", found);
  }
  return "";
}

}  // namespace espalier::cuda
