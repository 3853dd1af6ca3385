// bfloat16 products of a step beside float32 ones of the same sizes, in turns: own products that widen their factors,
// as processors without bfloat16 instructions make them, and as the matrix library makes them here.
//
//   product_bench [rounds 7] [threads 0: all]
//
// One JSON object a line: sizes, float32's rate in GFLOP/s, and the rates of the other two over it.
#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <vector>

#include "bench/spread.h"
#include "espalier/base/defined_sums.h"
#include "espalier/base/instruction_set.h"
#include "espalier/device/arena.h"
#include "espalier/ops/operations.h"

namespace {

using namespace espalier;

struct Case {
  const char* name;
  std::int64_t rows, outputs, inputs;
};
constexpr Case kCases[] = {{"hidden 512", 2048, 1536, 512},
                           {"hidden 512, down", 2048, 512, 1536},
                           {"hidden 2048", 2048, 2048, 2048},
                           {"an expert of 128 rows", 128, 768, 1024}};

struct Operands {
  Operands(const Case& c, at::ScalarType dtype)
      : x(at::randn({c.rows, c.inputs}, at::kFloat).to(dtype)),
        weight(at::randn({c.outputs, c.inputs}, at::kFloat).to(dtype)),
        out(at::zeros({c.rows, c.outputs}, dtype)),
        grad_x(at::zeros_like(x)),
        grad_weight(at::zeros({c.outputs, c.inputs}, at::kFloat)),
        flops(3 * 2.0 * static_cast<double>(c.rows * c.outputs * c.inputs)) {}

  // Forward and both backward products, as often as makes a tenth of a second of them.
  double rate(Arena& arena) {
    const int times = std::max(1, static_cast<int>(1e10 / flops));
    const ArenaScope scope(arena);
    const Operations& ops = arena.device().operations();
    at::Tensor rounded;
    if (ops.rounds_weight_gradients(out.scalar_type())) rounded = arena.take(weight.sizes(), weight.scalar_type());
    const double begin = bench::now();
    for (int i = 0; i < times; ++i) {
      ops.linear(out, x, weight, at::Tensor());
      ops.linear_grad_input(grad_x, out, weight);
      ops.add_linear_grad_weight(grad_weight, at::Tensor(), out, x, rounded);
    }
    return times * flops / (bench::now() - begin);
  }

  at::Tensor x, weight, out, grad_x, grad_weight;
  double flops;
};

}  // namespace

int main(int count, char** arguments) {
  const int rounds = count > 1 ? std::max(1, std::atoi(arguments[1])) : 7,
            threads = count > 2 ? std::atoi(arguments[2]) : 0;
  if (threads > 0) at::set_num_threads(threads);
  const Bfloat16Products own = bfloat16_products();
  Arena arena(std::int64_t{1} << 30);
  for (const Case& c : kCases) {
    Operands whole(c, at::kFloat), half(c, at::kBFloat16);
    std::vector<double> float32, widened, library;
    for (int round = -1; round < rounds; ++round) {  // the first touches memory
      const double plain = whole.rate(arena);
      force_bfloat16_products(Bfloat16Products::converted);
      const double by_panels = half.rate(arena);
      force_bfloat16_products(own);
      set_defined_sums(false);
      const double by_library = half.rate(arena);
      set_defined_sums(true);
      if (round < 0) continue;
      float32.push_back(plain), widened.push_back(by_panels), library.push_back(by_library);
    }
    std::printf("{\"case\": \"%s\", \"rows\": %lld, \"outputs\": %lld, \"inputs\": %lld, \"float32_gflops\": %.1f, ",
                c.name, static_cast<long long>(c.rows), static_cast<long long>(c.outputs),
                static_cast<long long>(c.inputs), 1e-9 * bench::median(float32));
    bench::print_spread("widened_over_float32", bench::ratios(widened, float32));
    std::printf(", ");
    bench::print_spread("library_over_float32", bench::ratios(library, float32));
    std::printf("}\n");
    std::fflush(stdout);
  }
  return 0;
}
