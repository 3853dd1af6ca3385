// The fused head (log-probs, entropies and their gradients, logits a block at a time) beside the same with all logits
// in memory, as ATen computes it: product, log_softmax, gather, its backward, two products.
//
//   head_bench [rounds 7] [output rows 4096] [width 512] [vocabulary 32768] [kept 0]
//
// The two take turns. One JSON object: seconds materialised over seconds fused, and the bytes of logits of each. With
// `kept` also seconds with a kept set of so many tokens for each row, over those without.
#include <ATen/Context.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/_log_softmax_backward_data.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/log_softmax.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/randint.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <string>
#include <vector>

#include "bench/spread.h"
#include "espalier/device/scalar_type.h"
#include "espalier/objective/fused_head.h"
#include "espalier/objective/head_buffers.h"

namespace {

using namespace espalier;

struct Problem {
  at::Tensor hidden, weight, target, grad_hidden, grad_weight;
  std::vector<double> temperature;
  std::vector<HeadEdge> edges;
  std::vector<std::vector<std::int32_t>> sets = {};
};

Problem make_problem(std::int64_t rows, std::int64_t width, std::int64_t vocabulary) {
  at::manual_seed(1);
  Problem made{at::randn({rows, width}),
               at::randn({vocabulary, width}) / std::sqrt(static_cast<double>(width)),
               at::randint(vocabulary, {rows, 1}, at::kLong),
               at::empty({rows, width}),
               at::zeros({vocabulary, width}),
               std::vector<double>(static_cast<std::size_t>(rows), 1.0),
               {}};
  for (std::int64_t row = 0; row < rows; ++row)
    made.edges.push_back(
        {static_cast<std::int32_t>(row), static_cast<std::int32_t>(made.target[row].item<std::int64_t>())});
  return made;
}

// The same edges, each drawn from a set of `kept` tokens.
Problem with_sets(const Problem& whole, std::int64_t kept, std::int64_t vocabulary) {
  Problem made = whole;
  for (HeadEdge& edge : made.edges) {
    const at::Tensor drawn = at::randint(vocabulary, {kept}, at::kLong);
    std::vector<std::int32_t>& ids = made.sets.emplace_back(1, edge.target);
    for (std::int64_t i = 1; i < kept; ++i) ids.push_back(static_cast<std::int32_t>(drawn[i].item<std::int64_t>()));
    std::ranges::sort(ids);
    ids.erase(std::ranges::unique(ids).begin(), ids.end());
  }
  for (std::size_t e = 0; e < made.edges.size(); ++e) made.edges[e].kept = made.sets[e];
  return made;
}

void run_fused(Problem& p, Arena& arena) {
  HeadEdges edges;
  ControlBlock block;
  edges.add_to(block, p.temperature, p.edges, p.weight.size(0));
  block.hand_over(arena.device());
  const auto objective = [](std::size_t, std::span<const double>, std::span<const double>, std::span<double> by_logprob,
                            std::span<double>) { std::ranges::fill(by_logprob, -1); };
  add_head_forward_backward({p.hidden, p.weight, edges}, objective, {p.grad_hidden, p.grad_weight}, arena);
}

// Returns the log-probs; the gradient is that of minus their sum.
at::Tensor run_materialised(Problem& p) {
  const at::Tensor log_p = at::log_softmax(at::mm(p.hidden, p.weight.t()), 1);
  const at::Tensor logprob = log_p.gather(1, p.target);
  const at::Tensor grad_log_p = at::zeros_like(log_p).scatter_(1, p.target, -1.0);
  const at::Tensor grad_logits = at::_log_softmax_backward_data(grad_log_p, log_p, 1, at::kFloat);
  at::mm_out(p.grad_hidden, grad_logits, p.weight);
  p.grad_weight.addmm_(grad_logits.t(), p.hidden);
  return logprob;
}

}  // namespace

int main(int argc, char** argv) {
  const auto number = [&](int index, std::int64_t otherwise) {
    return argc > index ? std::stoll(argv[index]) : otherwise;
  };
  const std::int64_t rows = number(2, 4096), width = number(3, 512), vocabulary = number(4, 32768);
  Problem p = make_problem(rows, width, vocabulary);
  Arena arena(std::int64_t{4} << 30);
  run_fused(p, arena);
  const at::Tensor fused = p.grad_hidden.clone();
  run_materialised(p);
  const double error = (p.grad_hidden - fused).norm().item<double>() / fused.norm().item<double>();
  const std::int64_t kept = number(5, 0);
  Problem over_sets = kept > 0 ? with_sets(p, kept, vocabulary) : Problem{};
  std::vector<double> own, plain, of_sets;
  for (std::int64_t round = 0; round < number(1, 7); ++round) {
    own.push_back(bench::seconds_of([&] { run_fused(p, arena); }));
    plain.push_back(bench::seconds_of([&] { run_materialised(p); }));
    if (kept > 0) of_sets.push_back(bench::seconds_of([&] { run_fused(over_sets, arena); }));
  }
  std::printf("{\"rows\": %ld, \"width\": %ld, \"vocabulary\": %ld, \"gradient_error\": %.1e, ",
              static_cast<long>(rows), static_cast<long>(width), static_cast<long>(vocabulary), error);
  bench::print_spread("materialised_over_fused", bench::ratios(plain, own));
  if (kept > 0) {
    std::printf(", ");
    bench::print_spread("kept_over_whole", bench::ratios(of_sets, own));
  }
  std::printf(", \"logits_bytes\": {\"fused\": %ld, \"materialised\": %ld}}\n",
              static_cast<long>(HeadBuffers(element_bytes(at::kFloat), rows, vocabulary, width, true).peak()),
              static_cast<long>(4 * rows * vocabulary));
}
