// Rates of shared-prefix attention beside ATen's CPU flash kernel on the same pairs and a matrix product of the run.
//
//   attention_bench [rounds 7] [cases 9] [float32 | bfloat16]
//
// The three are measured in turn, round after round, and compared within a round: a shared machine slows all alike.
// ATen computes what one of its calls can: the whole causal square, or per segment a rectangle over the path and a
// causal square, without the merge of the two (which it would also need). One JSON object a case: rates over that of
// the product of the same dtype, ATen's seconds over our own, and for float32 rates over what the multiply-add units
// can do at most (fma_peak.h): no kernel is faster than 1 of it.
#include <ATen/Context.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/_scaled_dot_product_flash_attention_for_cpu.h>
#include <ATen/ops/_scaled_dot_product_flash_attention_for_cpu_backward.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>
#include <omp.h>

#include <cmath>
#include <cstdio>
#include <string>
#include <tuple>
#include <vector>

#include "bench/fma_peak.h"
#include "bench/spread.h"
#include "espalier/base/instruction_set.h"
#include "espalier/ops/cpu/attention/attention.h"

namespace {

namespace attention = espalier::attention;

struct Case {
  const char* name;
  std::int64_t path, segments, segment_rows;
};

using espalier::bench::print_spread;
using espalier::bench::ratios;
using espalier::bench::seconds_of;

template <class T>
void run(const Case& c, std::int64_t D, int rounds) {
  constexpr bool half = std::is_same_v<T, espalier::bfloat16>;
  constexpr std::int64_t H = 8, J = 2;
  const std::int64_t own = c.segments * c.segment_rows, P = c.path;
  const double scale = 1 / std::sqrt(static_cast<double>(D));
  const auto random = [&](at::IntArrayRef sizes) { return at::randn(sizes).to(half ? at::kBFloat16 : at::kFloat); };
  const at::Tensor q = random({own, H, D}), grad = random({own, H, D});
  const at::Tensor k = random({own, J, D}), v = random({own, J, D});
  const at::Tensor pk = random({P, J, D}), pv = random({P, J, D});
  at::Tensor out = at::empty_like(q), lse = at::empty({H, own}), gq = at::empty_like(q);
  at::Tensor gk = at::zeros({own, J, D}), gv = at::zeros_like(gk), gpk = at::zeros({P, J, D}),
             gpv = at::zeros_like(gpk);
  std::vector<std::int32_t> ends(own);
  for (std::int64_t j = 0; j < own; ++j) ends[j] = static_cast<std::int32_t>((j / c.segment_rows + 1) * c.segment_rows);
  attention::Shape shape{own, own, P, H, J, D, scale, nullptr, ends.data()};
  const auto rows = [](const at::Tensor& t) {
    return attention::Rows<const T>{static_cast<const T*>(t.const_data_ptr()), t.stride(0)};
  };
  const auto into = [](at::Tensor& t) {
    return attention::Rows<T>{static_cast<T*>(t.mutable_data_ptr()), t.stride(0)};
  };
  const auto added = [](at::Tensor& t) { return attention::Rows<float>{t.mutable_data_ptr<float>(), t.stride(0)}; };
  const attention::Inputs<T> in{rows(q), rows(k), rows(v), rows(pk), rows(pv)};
  const attention::Gradients<T> grads{into(gq), added(gk), added(gv), added(gpk), added(gpv)};

  const auto batch = [](const at::Tensor& t, std::int64_t from, std::int64_t n) {
    return t.narrow(0, from, n).transpose(0, 1).unsqueeze(0);
  };
  struct Call {
    at::Tensor q, k, v, grad, out, lse;
    bool causal;
  };
  std::vector<Call> calls;
  for (std::int64_t s = 0; s < c.segments; ++s) {
    const std::int64_t n = c.segment_rows, from = s * n;
    if (P) calls.push_back({batch(q, from, n), batch(pk, 0, P), batch(pv, 0, P), batch(grad, from, n), {}, {}, false});
    calls.push_back({batch(q, from, n), batch(k, from, n), batch(v, from, n), batch(grad, from, n), {}, {}, true});
  }
  const double own_pairs = 0.5 * static_cast<double>(c.segments * c.segment_rows * (c.segment_rows + 1));
  const double pairs = static_cast<double>(H) * (static_cast<double>(own * P) + own_pairs);
  const std::int64_t M = 1536;
  const at::Tensor a = random({M, M}), b = random({M, M});
  at::Tensor ab = at::empty_like(a);
  std::vector<double> peak, mm, own_f, own_b, aten_f, aten_b;
  for (int r = 0; r < rounds; ++r) {
    if (!half) peak.push_back(espalier::bench::peak_seconds_per_flop());
    mm.push_back(seconds_of([&] { at::mm_out(ab, a, b); }));
    float* l = lse.data_ptr<float>();
    own_f.push_back(seconds_of([&] { attention::forward<T>(shape, in, into(out), l); }));
    aten_f.push_back(seconds_of([&] {
      for (Call& call : calls)
        std::tie(call.out, call.lse) =
            at::_scaled_dot_product_flash_attention_for_cpu(call.q, call.k, call.v, 0, call.causal, {}, scale);
    }));
    own_b.push_back(seconds_of([&] { attention::add_backward<T>(shape, in, rows(out), l, rows(grad), grads); }));
    aten_b.push_back(seconds_of([&] {
      for (Call& call : calls)
        at::_scaled_dot_product_flash_attention_for_cpu_backward(call.grad, call.q, call.k, call.v, call.out, call.lse,
                                                                 0, call.causal, {}, scale);
    }));
  }
  std::vector<double> product(mm.size()), forward, backward, aten_backward;  // seconds a FLOP
  for (std::size_t i = 0; i < mm.size(); ++i) product[i] = mm[i] / (2.0 * M * M * M);
  for (const double seconds : own_f) forward.push_back(seconds / (4 * pairs * static_cast<double>(D)));
  for (const double seconds : own_b) backward.push_back(seconds / (10 * pairs * static_cast<double>(D)));
  for (const double seconds : aten_b) aten_backward.push_back(seconds / (10 * pairs * static_cast<double>(D)));
  std::printf("{\"case\": \"%s\", \"dtype\": \"%s\", \"head_dim\": %ld, \"instruction_set\": \"%s\", ", c.name,
              half ? "bfloat16" : "float32", static_cast<long>(D), espalier::name_of(espalier::instruction_set()));
  std::printf("\"bfloat16_products\": \"%s\", \"threads\": %d, ", espalier::name_of(espalier::bfloat16_products()),
              omp_get_max_threads());
  print_spread("product_seconds_per_flop", product);
  for (const auto& [name, values] : {std::pair("forward_over_product", ratios(product, forward)),
                                     std::pair("backward_over_product", ratios(product, backward)),
                                     std::pair("forward_over_aten", ratios(aten_f, own_f)),
                                     std::pair("backward_over_aten", ratios(aten_b, own_b))}) {
    std::printf(", ");
    print_spread(name, values);
  }
  if (!half)
    for (const auto& [name, rate] :
         {std::pair("forward_over_peak", &forward), std::pair("backward_over_peak", &backward),
          std::pair("aten_backward_over_peak", &aten_backward)}) {
      std::printf(", ");
      print_spread(name, ratios(peak, *rate));
    }
  std::printf("}\n");
  std::fflush(stdout);
}

}  // namespace

int main(int argc, char** argv) {
  const int rounds = argc > 1 ? std::stoi(argv[1]) : 7, cases = argc > 2 ? std::stoi(argv[2]) : 9;
  const bool half = argc > 3 && std::string(argv[3]) == "bfloat16";
  at::manual_seed(1);
  int done = 0;
  const auto measure = [&](const Case& c, std::int64_t D) {
    if (done++ < cases) (half ? run<espalier::bfloat16> : run<float>)(c, D, rounds);
  };
  const Case group{"1024 + 4 x 256", 1024, 4, 256};
  for (const Case& c : {group, Case{"4096 + 512", 4096, 1, 512}, Case{"causal 2048", 0, 1, 2048}})
    for (const std::int64_t D : {64, 128}) measure(c, D);
  for (const std::int64_t D : {80, 96, 256}) measure(group, D);
}
