// Own products (ops/cpu/own_products.h) beside the matrix library's and the peak of the multiply-add units, in turns:
// each form of a linear layer by itself. One thread's times are those that it ran.
//
//   own_product_bench [rounds 7] [threads 1] [dtype: Float, Double, BFloat16; all]
//
// One JSON object a line: dtype, sizes, the form, the library's rate in GFLOP/s, and the own rate over it and over the
// peak, which is that of float32, half of it for float64, twice for bfloat16 where there are instructions.
#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

#include "bench/fma_peak.h"
#include "bench/spread.h"
#include "espalier/base/defined_sums.h"
#include "espalier/base/instruction_set.h"
#include "espalier/device/device.h"
#include "espalier/ops/operations.h"

namespace {

using namespace espalier;

struct Layer {
  std::int64_t outputs, inputs;
};
constexpr Layer kLayers[] = {{1536, 512}, {512, 1536}, {2048, 2048}};
constexpr std::int64_t kRows[] = {1, 8, 64, 256, 2048};
constexpr at::ScalarType kDtypes[] = {at::kFloat, at::kDouble, at::kBFloat16};
constexpr const char* kForms[] = {"forward", "grad_input", "grad_weight", "forward_held"};  // the last: hold_weights

struct Operands {
  Operands(const Layer& layer, std::int64_t rows, at::ScalarType dtype)
      : x(at::randn({rows, layer.inputs}, at::kFloat).to(dtype)),
        weight(at::randn({layer.outputs, layer.inputs}, at::kFloat).to(dtype)),
        out(at::randn({rows, layer.outputs}, at::kFloat).to(dtype)),
        grad_x(at::zeros_like(x)),
        grad_weight(at::zeros({layer.outputs, layer.inputs}, dtype == at::kDouble ? at::kDouble : at::kFloat)),
        rounded(at::zeros_like(weight)),
        flops(2.0 * static_cast<double>(rows * layer.outputs * layer.inputs)) {}

  // Products of about 20 milliseconds.
  double rate(int form, bool own, double (*clock)()) const {
    set_defined_sums(own);
    const Operations& ops = cpu_device().operations();
    const int times = std::max(1, static_cast<int>(2e9 / flops));
    const auto held = form == 3 ? ops.hold_weights({weight}, x.scalar_type(), std::int64_t{1} << 40) : nullptr;
    const double begin = clock();
    for (int i = 0; i < times; ++i) {
      if (form == 0 || form == 3) ops.linear(out, x, weight, at::Tensor());
      if (form == 1) ops.linear_grad_input(grad_x, out, weight);
      if (form == 2) ops.add_linear_grad_weight(grad_weight, at::Tensor(), out, x, rounded);
    }
    return times * flops / (clock() - begin);
  }

  at::Tensor x, weight, out, grad_x, grad_weight, rounded;
  double flops;
};

double peak_factor(at::ScalarType dtype) {
  if (dtype == at::kDouble) return 0.5;
  return dtype == at::kBFloat16 && bfloat16_products() != Bfloat16Products::converted ? 2 : 1;
}

}  // namespace

int main(int count, char** arguments) {
  const int rounds = count > 1 ? std::max(1, std::atoi(arguments[1])) : 7,
            threads = count > 2 ? std::atoi(arguments[2]) : 1;
  const std::string asked = count > 3 ? arguments[3] : "all";
  if (threads > 0) at::set_num_threads(threads);
  double (*const clock)() = threads == 1 ? bench::processor_now : bench::now;
  for (const at::ScalarType dtype : kDtypes)
    for (const Layer& layer : kLayers)
      for (const std::int64_t rows : kRows) {
        if (asked != "all" && asked != c10::toString(dtype)) continue;
        const Operands operands(layer, rows, dtype);
        for (int form = 0; form < 4; ++form) {
          std::vector<double> own, library, peak;
          for (int round = -1; round < rounds; ++round) {  // the first touches memory
            const double theirs = operands.rate(form, false, clock), ours = operands.rate(form, true, clock);
            const double most = peak_factor(dtype) / bench::peak_seconds_per_flop(clock);
            if (round >= 0) own.push_back(ours), library.push_back(theirs), peak.push_back(most);
          }
          std::printf(
              "{\"dtype\": \"%s\", \"form\": \"%s\", \"rows\": %lld, \"outputs\": %lld, \"inputs\": %lld, "
              "\"library_gflops\": %.1f, ",
              c10::toString(dtype), kForms[form], static_cast<long long>(rows), static_cast<long long>(layer.outputs),
              static_cast<long long>(layer.inputs), 1e-9 * bench::median(library));
          bench::print_spread("own_over_library", bench::ratios(own, library));
          std::printf(", ");
          bench::print_spread("own_over_peak", bench::ratios(own, peak));
          std::printf("}\n");
          std::fflush(stdout);
        }
      }
  return 0;
}
