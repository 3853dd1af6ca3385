// The head's gradients against torch autograd on the plain head in float64, and in float32 and bfloat16 by the rule
// that the error against float64 is at most twice that of the plain head in the same dtype. Central differences as a
// second oracle.
#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <cmath>
#include <vector>

#include "espalier/objective/fused_head.h"

namespace espalier {
namespace {

constexpr std::int64_t kArenaBytes = std::int64_t{1} << 30;

struct Case {
  at::Tensor hidden, weight;
  std::vector<double> temperature;
  std::vector<HeadEdge> edges;
  std::vector<double> grad_logprob, grad_entropy;

  HeadProblem problem() const {
    ControlBlock block;
    handed_over = {};
    handed_over.add_to(block, temperature, edges, weight.size(0));
    block.hand_over(cpu_device());
    return {hidden, weight, handed_over};
  }
  mutable HeadEdges handed_over = {};
};

struct Gradients {
  at::Tensor hidden, weight;  // float64
};

// Row o has `o % 4` edges (so some rows have none), with repeated targets among them.
Case make_case(std::int64_t outputs, std::int64_t width, std::int64_t vocabulary, at::ScalarType dtype, int seed,
               bool with_entropy) {
  at::manual_seed(seed);
  Case made;
  made.hidden = (at::randn({outputs, width}, at::kDouble) * 2).to(dtype);
  made.weight = (at::randn({vocabulary, width}, at::kDouble) / std::sqrt(static_cast<double>(width))).to(dtype);
  for (std::int64_t o = 0; o < outputs; ++o) {
    made.temperature.push_back(0.5 + 0.25 * static_cast<double>(o % 5));
    for (std::int64_t e = 0; e < o % 4; ++e)
      made.edges.push_back({static_cast<std::int32_t>(o), static_cast<std::int32_t>((o + e / 2) % vocabulary)});
  }
  const at::Tensor g = at::randn({2, static_cast<std::int64_t>(made.edges.size())}, at::kDouble);
  for (std::size_t e = 0; e < made.edges.size(); ++e) {
    made.grad_logprob.push_back(g[0][e].item<double>());
    made.grad_entropy.push_back(with_entropy ? g[1][e].item<double>() : 0.0);
  }
  return made;
}

// Log-probs and entropies with autograd in `dtype` (softmax in float32 for bfloat16), summed with the edge gradients.
at::Tensor plain_loss(const Case& made, const at::Tensor& hidden, const at::Tensor& weight) {
  const at::ScalarType dtype = hidden.scalar_type() == at::kBFloat16 ? at::kFloat : hidden.scalar_type();
  const at::Tensor temperature = at::tensor(made.temperature, at::kDouble).to(dtype).unsqueeze(1);
  const at::Tensor z = hidden.mm(weight.t()).to(dtype) / temperature;
  const at::Tensor log_p = at::log_softmax(z, 1), entropy = -(log_p.exp() * log_p).sum(1);
  std::vector<std::int64_t> rows, targets;
  for (const HeadEdge& edge : made.edges) rows.push_back(edge.output), targets.push_back(edge.target);
  const at::Tensor row = at::tensor(rows, at::kLong), target = at::tensor(targets, at::kLong);
  return (log_p.index({row, target}) * at::tensor(made.grad_logprob, at::kDouble).to(dtype)).sum() +
         (entropy.index({row}) * at::tensor(made.grad_entropy, at::kDouble).to(dtype)).sum();
}

Gradients plain_gradients(const Case& made, at::ScalarType dtype) {
  const at::Tensor hidden = made.hidden.to(dtype).clone().requires_grad_(true);
  const at::Tensor weight = made.weight.to(dtype).clone().requires_grad_(true);
  plain_loss(made, hidden, weight).backward();
  return {hidden.grad().to(at::kDouble), weight.grad().to(at::kDouble)};
}

Gradients fused_gradients(const Case& made, bool one_pass) {
  const at::ScalarType accumulator = made.hidden.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
  const HeadGradients out = {at::full_like(made.hidden, 1e30), at::zeros(made.weight.sizes(), accumulator)};
  Arena arena(kArenaBytes);
  if (one_pass) {
    add_head_forward_backward(
        made.problem(),
        [&](std::size_t first, std::span<const double> logprob, std::span<const double>, std::span<double> by_logprob,
            std::span<double> by_entropy) {
          for (std::size_t e = 0; e < logprob.size(); ++e)
            by_logprob[e] = made.grad_logprob[first + e], by_entropy[e] = made.grad_entropy[first + e];
        },
        out, arena);
  } else {
    add_head_backward(made.problem(), made.grad_logprob, made.grad_entropy, out, arena);
  }
  return {out.grad_hidden_OM.to(at::kDouble), out.grad_weight_VM.to(at::kDouble)};
}

double relative(const at::Tensor& got, const at::Tensor& expected) {
  return ((got - expected).norm() / expected.norm()).item<double>();
}

TEST(HeadGradient, Float64AgreesWithAutograd) {
  for (std::int64_t vocabulary : {3, 64, 1031})
    for (bool with_entropy : {false, true})
      for (bool one_pass : {false, true}) {
        const Case made = make_case(23, 16, vocabulary, at::kDouble, 5, with_entropy);
        const Gradients expected = plain_gradients(made, at::kDouble), got = fused_gradients(made, one_pass);
        EXPECT_LT(relative(got.hidden, expected.hidden), 1e-12) << vocabulary << with_entropy << one_pass;
        EXPECT_LT(relative(got.weight, expected.weight), 1e-12) << vocabulary << with_entropy << one_pass;
        EXPECT_EQ(got.hidden[0].abs().max().item<double>(), 0.0);  // a row without edges is overwritten with zeros
      }
}

TEST(HeadGradient, LowerDtypesAreNoWorseThanTwiceThePlainOnes) {
  for (at::ScalarType dtype : {at::kFloat, at::kBFloat16})
    for (bool with_entropy : {false, true}) {
      const Case made = make_case(80, 64, 1537, dtype, 6, with_entropy);
      const Gradients exact = plain_gradients(made, at::kDouble), plain = plain_gradients(made, dtype);
      const Gradients got = fused_gradients(made, true);
      EXPECT_LE(relative(got.hidden, exact.hidden), 2 * relative(plain.hidden, exact.hidden)) << dtype << with_entropy;
      EXPECT_LE(relative(got.weight, exact.weight), 2 * relative(plain.weight, exact.weight)) << dtype << with_entropy;
    }
}

TEST(HeadGradient, SeveralBlocksAndWideBfloat16RunsJoin) {
  {
    const Case made = make_case(600, 8, 37, at::kDouble, 7, true);  // three blocks of 256 rows
    const Gradients expected = plain_gradients(made, at::kDouble), got = fused_gradients(made, true);
    EXPECT_LT(relative(got.hidden, expected.hidden), 1e-12);
    EXPECT_LT(relative(got.weight, expected.weight), 1e-12);
  }
  const Case made = make_case(9, 1024, 5001, at::kBFloat16, 8, true);  // 16 MiB hold 4096 of 5001 widened rows
  const Gradients exact = plain_gradients(made, at::kDouble), got = fused_gradients(made, true);
  // grad_hidden is rounded once to bfloat16 (2^-9); grad_weight stays in float32.
  EXPECT_LT(relative(got.hidden, exact.hidden), 1.0 / 512);
  EXPECT_LT(relative(got.weight, exact.weight), 1e-5);
}

TEST(HeadGradient, WeightGradientIsAddedTo) {
  const Case made = make_case(12, 8, 37, at::kDouble, 9, true);
  const Gradients once = fused_gradients(made, false);
  const HeadGradients out = {at::empty_like(made.hidden), at::ones(made.weight.sizes(), at::kDouble)};
  Arena arena(kArenaBytes);
  for (int time = 0; time < 2; ++time)
    add_head_backward(made.problem(), made.grad_logprob, made.grad_entropy, out, arena);
  EXPECT_LT(relative(out.grad_weight_VM, 1 + 2 * once.weight), 1e-14);
}

TEST(HeadGradient, AgreesWithCentralDifferences) {
  Case made = make_case(6, 5, 11, at::kDouble, 10, true);
  const Gradients got = fused_gradients(made, false);
  const auto loss = [&] {
    Arena arena(kArenaBytes);
    std::vector<double> logprob(made.edges.size()), entropy(made.edges.size());
    head_forward(made.problem(), logprob, entropy, arena);
    double sum = 0;
    for (std::size_t e = 0; e < logprob.size(); ++e)
      sum += made.grad_logprob[e] * logprob[e] + made.grad_entropy[e] * entropy[e];
    return sum;
  };
  const double step = 1e-5;  // error h^2 f''' / 6 + 2^-53 |f| / h: about 1e-9
  for (const auto& [input, gradient] : {std::pair{made.hidden, got.hidden}, std::pair{made.weight, got.weight}})
    for (std::int64_t k = 0; k < input.numel(); ++k) {
      double& x = input.mutable_data_ptr<double>()[k];
      const double before = x;
      x = before + step;
      const double above = loss();
      x = before - step;
      const double below = loss();
      x = before;
      EXPECT_NEAR(gradient.const_data_ptr<double>()[k], (above - below) / (2 * step), 1e-7);
    }
}

TEST(HeadGradient, HugeLogitsGiveFiniteGradients) {
  for (at::ScalarType dtype : {at::kFloat, at::kDouble}) {
    Case made = make_case(8, 16, 101, dtype, 11, true);
    made.hidden.mul_(1e4);
    const Gradients got = fused_gradients(made, true);
    EXPECT_TRUE(got.hidden.isfinite().all().item<bool>());
    EXPECT_TRUE(got.weight.isfinite().all().item<bool>());
    const Gradients expected = plain_gradients(made, at::kDouble);
    if (dtype == at::kDouble) {
      EXPECT_LT(relative(got.weight, expected.weight), 1e-9);  // logits of 1e5 carry 1e5 * 2^-53
    }
  }
}

}  // namespace
}  // namespace espalier
