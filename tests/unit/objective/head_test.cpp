// The fused head: values against log_softmax and gradients against torch autograd on the same plain head in float64,
// lower dtypes by the rule that the error against float64 is at most twice that of the plain head in the same dtype;
// central differences as a second oracle of the gradients; and its bookkeeping: scratch bytes, order of the callback,
// blocks, empty cases.
#include <ATen/Context.h>
#include <ATen/TensorIndexing.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/full.h>
#include <ATen/ops/full_like.h>
#include <ATen/ops/log_softmax.h>
#include <ATen/ops/logsumexp.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>
#include <gtest/gtest.h>

#include <cmath>
#include <thread>
#include <vector>

#include "espalier/base/error.h"
#include "espalier/base/instruction_set.h"
#include "espalier/device/scalar_type.h"
#include "espalier/objective/fused_head.h"
#include "espalier/objective/head_buffers.h"
#include "espalier/ops/cpu/head_kernels.h"

namespace espalier {
namespace {

constexpr std::int64_t kArenaBytes = std::int64_t{1} << 30;

struct Case {
  at::Tensor hidden, weight;
  std::vector<double> temperature;
  std::vector<HeadEdge> edges;
  std::vector<double> grad_logprob, grad_entropy;  // of the edges
  std::vector<std::vector<std::int32_t>> sets;     // that edges are drawn from, if not from the whole vocabulary

  HeadProblem problem() const {
    ControlBlock block;
    handed_over = {};
    handed_over.add_to(block, temperature, edges, weight.size(0));
    block.hand_over(cpu_device());
    return {hidden, weight, handed_over};
  }
  mutable HeadEdges handed_over = {};
};

// Row o has `o % 4` edges (so some rows have none), with repeated targets among them.
Case make_case(std::int64_t outputs, std::int64_t width, std::int64_t vocabulary, at::ScalarType dtype,
               double scale = 1, bool with_entropy = true) {
  at::manual_seed(1);
  Case made;
  made.hidden = (at::randn({outputs, width}, at::kDouble) * scale).to(dtype);
  made.weight = (at::randn({vocabulary, width}, at::kDouble) / std::sqrt(static_cast<double>(width))).to(dtype);
  for (std::int64_t o = 0; o < outputs; ++o) {
    made.temperature.push_back(0.7 + 0.15 * static_cast<double>(o % 5));
    for (std::int64_t e = 0; e < o % 4; ++e)
      made.edges.push_back({static_cast<std::int32_t>(o), static_cast<std::int32_t>((7 * o + e / 2) % vocabulary)});
  }
  const at::Tensor slopes = at::randn({2, static_cast<std::int64_t>(made.edges.size())}, at::kDouble);
  for (std::size_t e = 0; e < made.edges.size(); ++e) {
    made.grad_logprob.push_back(slopes[0][e].item<double>());
    made.grad_entropy.push_back(with_entropy ? slopes[1][e].item<double>() : 0.0);
  }
  return made;
}

// The same with kept sets: of a row's edges the first may be drawn from the whole vocabulary, the others are drawn from
// one set or from several. Edges of the last row are drawn from one set of all tokens.
Case make_kept_case(std::int64_t outputs, std::int64_t width, std::int64_t vocabulary, at::ScalarType dtype,
                    double scale = 1) {
  Case made = make_case(outputs, width, vocabulary, dtype, scale);
  made.sets.reserve(made.edges.size());
  for (std::size_t e = 0; e < made.edges.size(); ++e) {
    HeadEdge& edge = made.edges[e];
    const bool last = edge.output == outputs - 1, first = e == 0 || made.edges[e - 1].output != edge.output;
    if (!last && first && edge.output % 3 != 0) continue;
    const std::int32_t step = last ? 1 : 2 + (edge.output + static_cast<std::int32_t>(e / 2)) % 5;
    std::vector<std::int32_t>& ids = made.sets.emplace_back();
    for (std::int32_t v = edge.target % step; v < vocabulary; v += step) ids.push_back(v);
    edge.kept = ids;
  }
  return made;
}

at::ScalarType accumulator_of(at::ScalarType dtype) { return dtype == at::kBFloat16 ? at::kFloat : dtype; }

struct Plain {
  at::Tensor logprob_E, entropy_E;
};

// With nothing of the code under test: the whole logits in the dtype of hidden and weight, log_softmax, sums.
Plain plain_head(const Case& made, const at::Tensor& hidden, const at::Tensor& weight) {
  const at::ScalarType dtype = accumulator_of(hidden.scalar_type());
  const at::Tensor temperature = at::tensor(made.temperature, at::kDouble).to(dtype).unsqueeze(1);
  const at::Tensor z = hidden.mm(weight.t()).to(dtype) / temperature;
  if (made.sets.empty()) {
    const at::Tensor log_p = at::log_softmax(z, 1);
    std::vector<std::int64_t> rows, targets;
    for (const HeadEdge& edge : made.edges) rows.push_back(edge.output), targets.push_back(edge.target);
    const at::Tensor row = at::tensor(rows, at::kLong), target = at::tensor(targets, at::kLong);
    return {log_p.index({row, target}), -(log_p.exp() * log_p).sum(1).index({row})};
  }
  std::vector<at::Tensor> logprob, entropy;
  for (const HeadEdge& edge : made.edges) {
    std::vector<std::int64_t> ids(edge.kept.begin(), edge.kept.end());
    if (ids.empty())
      for (std::int64_t v = 0; v < z.size(1); ++v) ids.push_back(v);
    const at::Tensor of_set = z[edge.output].index({at::tensor(ids, at::kLong)}), log_p = at::log_softmax(of_set, 0);
    logprob.push_back(log_p[std::ranges::find(ids, edge.target) - ids.begin()]);
    entropy.push_back(-(log_p.exp() * log_p).sum());
  }
  return {at::stack(logprob), at::stack(entropy)};
}

struct Values {
  std::vector<double> logprob, entropy;
};

std::vector<double> numbers(const at::Tensor& tensor) {
  const at::Tensor exact = tensor.to(at::kDouble).contiguous();
  return {exact.const_data_ptr<double>(), exact.const_data_ptr<double>() + exact.numel()};
}

Values plain_values(const Case& made, at::ScalarType dtype) {
  const Plain plain = plain_head(made, made.hidden.to(dtype), made.weight.to(dtype));
  return {numbers(plain.logprob_E), numbers(plain.entropy_E)};
}

Values fused_values(const Case& made) {
  Arena arena(kArenaBytes);
  Values result{std::vector<double>(made.edges.size(), 1e300), std::vector<double>(made.edges.size(), 1e300)};
  head_forward(made.problem(), result.logprob, result.entropy, arena);
  return result;
}

struct Gradients {
  at::Tensor hidden, weight;  // float64
};

// Gradients of the values weighed with the slopes of the edges.
Gradients plain_gradients(const Case& made, at::ScalarType dtype) {
  const at::Tensor hidden = made.hidden.to(dtype).clone().requires_grad_(true);
  const at::Tensor weight = made.weight.to(dtype).clone().requires_grad_(true);
  const Plain plain = plain_head(made, hidden, weight);
  const at::Tensor by_logprob = at::tensor(made.grad_logprob, at::kDouble).to(accumulator_of(dtype));
  const at::Tensor by_entropy = at::tensor(made.grad_entropy, at::kDouble).to(accumulator_of(dtype));
  ((plain.logprob_E * by_logprob).sum() + (plain.entropy_E * by_entropy).sum()).backward();
  return {hidden.grad().to(at::kDouble), weight.grad().to(at::kDouble)};
}

Gradients fused_gradients(const Case& made, bool one_pass) {
  const HeadGradients out = {at::full_like(made.hidden, 1e30),
                             at::zeros(made.weight.sizes(), accumulator_of(made.hidden.scalar_type()))};
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

double distance(const std::vector<double>& a, const std::vector<double>& b) {
  double sum = 0;
  for (std::size_t i = 0; i < a.size(); ++i) sum += (a[i] - b[i]) * (a[i] - b[i]);
  return std::sqrt(sum);
}

TEST(FusedHead, Float64AgreesWithLogSoftmax) {
  for (std::int64_t vocabulary : {1, 2, 7, 64, 1023, 1025, 4099}) {
    const Case made = make_case(17, 24, vocabulary, at::kDouble);
    const Values expected = plain_values(made, at::kDouble), got = fused_values(made);
    for (std::size_t e = 0; e < made.edges.size(); ++e) {
      // Sums of 24 products and of some thousand exponentials, in another order: some dozen units in the last place.
      EXPECT_NEAR(got.logprob[e], expected.logprob[e], 1e-12 * (1 + std::abs(expected.logprob[e]))) << vocabulary;
      EXPECT_NEAR(got.entropy[e], expected.entropy[e], 1e-12 * (1 + expected.entropy[e])) << vocabulary;
    }
  }
}

TEST(FusedHead, Float64AgreesWithLogSoftmaxOverKeptSets) {
  for (std::int64_t vocabulary : {1, 2, 7, 1025, 4099}) {
    const Case made = make_kept_case(18, 24, vocabulary, at::kDouble);
    const Values expected = plain_values(made, at::kDouble), got = fused_values(made);
    for (std::size_t e = 0; e < made.edges.size(); ++e) {
      EXPECT_NEAR(got.logprob[e], expected.logprob[e], 1e-12 * (1 + std::abs(expected.logprob[e]))) << vocabulary;
      EXPECT_NEAR(got.entropy[e], expected.entropy[e], 1e-12 * (1 + expected.entropy[e])) << vocabulary;
    }
  }
}

TEST(FusedHead, ASetOfAllTokensHasTheBitsOfTheWholeVocabulary) {
  for (at::ScalarType dtype : {at::kDouble, at::kFloat, at::kBFloat16}) {
    const Case whole = make_case(12, 16, 1031, dtype);
    Case kept = make_case(12, 16, 1031, dtype);
    std::vector<std::int32_t>& all = kept.sets.emplace_back();
    for (std::int32_t v = 0; v < 1031; ++v) all.push_back(v);
    for (std::size_t e = 1; e < kept.edges.size(); ++e)
      if (kept.edges[e].output == kept.edges[e - 1].output) kept.edges[e].kept = all;
    const Values expected = fused_values(whole), got = fused_values(kept);
    EXPECT_EQ(got.logprob, expected.logprob);
    EXPECT_EQ(got.entropy, expected.entropy);
    for (HeadEdge& edge : kept.edges) edge.kept = all;
    EXPECT_TRUE(at::equal(fused_gradients(kept, true).hidden, fused_gradients(whole, true).hidden));
    EXPECT_TRUE(at::equal(fused_gradients(kept, true).weight, fused_gradients(whole, true).weight));
  }
}

TEST(FusedHead, LowerDtypesAreNoWorseThanTwiceThePlainOnes) {
  for (at::ScalarType dtype : {at::kFloat, at::kBFloat16})
    for (double scale : {1.0, 30.0}) {
      const bool kept = scale == 1;
      const Case made = kept ? make_kept_case(60, 96, 1537, dtype, scale) : make_case(60, 96, 1537, dtype, scale);
      const Values exact = plain_values(made, at::kDouble), plain = plain_values(made, dtype), got = fused_values(made);
      EXPECT_LE(distance(got.logprob, exact.logprob), 2 * distance(plain.logprob, exact.logprob)) << dtype << scale;
      EXPECT_LE(distance(got.entropy, exact.entropy), 2 * distance(plain.entropy, exact.entropy)) << dtype << scale;
    }
}

TEST(FusedHead, HugeLogitsNeitherOverflowNorLoseTheirDifferences) {
  for (at::ScalarType dtype : {at::kDouble, at::kFloat}) {
    Case made;
    made.hidden = at::full({1, 1}, 1.0, dtype);
    made.weight = at::full({2000, 1}, -1e4, dtype);
    made.weight.select(0, 3).fill_(1e4);
    made.weight.select(0, 1999).fill_(1e4 - 1);
    made.temperature = {1.0};
    made.edges = {{0, 3}, {0, 1999}, {0, 7}};
    const Values got = fused_values(made);
    const double log_sum = std::log1p(std::exp(-1.0)), p = 1 / (1 + std::exp(-1.0));
    // 1e4 and 1e4 - 1 are exact in float32; what is left is the error of exp and log near 1.
    const double tolerance = dtype == at::kFloat ? 4e-7 : 1e-15;
    EXPECT_NEAR(got.logprob[0], -log_sum, tolerance);
    EXPECT_NEAR(got.logprob[1], -1 - log_sum, tolerance);
    EXPECT_NEAR(got.logprob[2], -2e4 - log_sum, 2e4 * 1e-15 + tolerance);
    EXPECT_NEAR(got.entropy[0], -p * std::log(p) - (1 - p) * std::log(1 - p), tolerance);
  }
}

TEST(FusedHead, EveryInstructionSetGivesTheSameRow) {
  const InstructionSet before = instruction_set();
  for (std::int64_t n : {1, 3, 16, 17, 1024, 1031, 5000}) {
    at::manual_seed(3);
    const at::Tensor raw = at::randn({n}, at::kDouble) * 4;
    const HeadRowSums exact = [&] {
      const at::Tensor log_p = at::log_softmax(raw / 0.8, 0);
      return HeadRowSums{raw.max().item<double>(), at::logsumexp((raw - raw.max()) / 0.8, {0}).item<double>(),
                         -(log_p.exp() * log_p).sum().item<double>()};
    }();
    for (InstructionSet set : kInstructionSets) {
      if (!processor_has(set)) continue;
      force_instruction_set(set);
      const HeadRowSums got = compute_row_sums(raw.const_data_ptr<double>(), n, 1 / 0.8);
      EXPECT_EQ(got.max_raw, exact.max_raw) << n << name_of(set);
      EXPECT_NEAR(got.log_sum, exact.log_sum, 1e-13) << n << name_of(set);
      EXPECT_NEAR(got.entropy, exact.entropy, 1e-13) << n << name_of(set);
      const at::Tensor raw_float = raw.to(at::kFloat);
      const HeadRowSums single = compute_row_sums(raw_float.const_data_ptr<float>(), n, 1 / 0.8);
      // Inputs rounded to 2^-24 relative (numbers up to 16), terms rounded once more.
      EXPECT_NEAR(single.log_sum, exact.log_sum, 4e-6) << n << name_of(set);
      EXPECT_NEAR(single.entropy, exact.entropy, 1e-5) << n << name_of(set);
    }
  }
  force_instruction_set(before);
}

std::int64_t announced_bytes(std::int64_t outputs, std::int64_t vocabulary, std::int64_t width, at::ScalarType dtype) {
  return HeadBuffers(element_bytes(dtype), outputs, vocabulary, width, true).peak();
}

TEST(FusedHead, ScratchIsExactlyWhatWasAnnounced) {
  for (at::ScalarType dtype : {at::kDouble, at::kFloat, at::kBFloat16})
    for (std::int64_t outputs : {1, 5, 256, 300}) {
      const std::int64_t vocabulary = 1001, width = 24;
      const Case made = make_case(outputs, width, vocabulary, dtype);
      Arena arena(kArenaBytes);
      const at::Tensor held = arena.take({3}, at::kFloat);
      const std::int64_t before = arena.in_use(), announced = announced_bytes(outputs, vocabulary, width, dtype);
      const HeadGradients out = {at::empty_like(made.hidden), at::zeros({vocabulary, width}, accumulator_of(dtype))};
      std::vector<double> series(made.edges.size());
      add_head_backward(made.problem(), series, series, out, arena);
      EXPECT_EQ(arena.high_water() - before, announced) << dtype << " " << outputs;
      EXPECT_EQ(arena.in_use(), before);
      arena.reset_high_water();
      add_head_forward_backward(
          made.problem(), [](auto&&...) {}, out, arena);
      EXPECT_EQ(arena.high_water() - before, announced) << dtype << " " << outputs;
      arena.reset_high_water();
      head_forward(made.problem(), series, series, arena);
      EXPECT_LE(arena.high_water() - before, announced) << dtype << " " << outputs;
      EXPECT_EQ(arena.in_use(), before);
    }
}

TEST(FusedHead, BlocksShrinkWithTheVocabularyAndJoinSeamlessly) {
  const std::int64_t vocabulary = 100003, outputs = 170, width = 3;
  // 64 MiB / (4 * 100003) = 167 rows.
  EXPECT_EQ(announced_bytes(outputs, vocabulary, width, at::kFloat), (167 * vocabulary * 4 + 63) / 64 * 64);
  Case made = make_case(outputs, width, vocabulary, at::kFloat);
  made.edges.clear();
  for (std::int32_t o : {0, 166, 167, 169}) made.edges.push_back({o, 99999 - o});
  const Values got = fused_values(made);
  for (std::size_t e = 0; e < made.edges.size(); ++e) {
    const HeadEdge edge = made.edges[e];
    const at::Tensor raw = made.weight.to(at::kDouble).mv(made.hidden[edge.output].to(at::kDouble));
    const at::Tensor z = raw / made.temperature[edge.output];
    const at::Tensor log_p = at::log_softmax(z, 0);
    // Log-probs near -12, three products a logit: a few units of 2^-24 on numbers below 16.
    EXPECT_NEAR(got.logprob[e], log_p[edge.target].item<double>(), 5e-6);
    EXPECT_NEAR(got.entropy[e], -(log_p.exp() * log_p).sum().item<double>(), 2e-5);
  }
}

TEST(FusedHead, AsksForGradientsOnceABlockInEdgeOrderOnTheCallersThread) {
  const Case made = make_case(300, 8, 33, at::kFloat);
  const Values expected = fused_values(made);
  Arena arena(kArenaBytes);
  const HeadGradients out = {at::empty_like(made.hidden), at::zeros_like(made.weight)};
  std::vector<double> logprob, entropy;
  int blocks = 0;
  const std::thread::id caller = std::this_thread::get_id();
  add_head_forward_backward(
      made.problem(),
      [&](std::size_t first, std::span<const double> of_block, std::span<const double> entropies,
          std::span<double> by_logprob, std::span<double> by_entropy) {
        ++blocks;
        EXPECT_EQ(first, logprob.size());
        EXPECT_EQ(by_logprob.size(), of_block.size());
        EXPECT_EQ(by_entropy.size(), of_block.size());
        EXPECT_EQ(std::this_thread::get_id(), caller);
        logprob.insert(logprob.end(), of_block.begin(), of_block.end());
        entropy.insert(entropy.end(), entropies.begin(), entropies.end());
      },
      out, arena);
  EXPECT_EQ(blocks, 2);  // of 256 and 44 rows
  EXPECT_EQ(logprob, expected.logprob);
  EXPECT_EQ(entropy, expected.entropy);
  EXPECT_EQ(out.grad_hidden_OM.abs().max().item<float>(), 0.0f);
}

TEST(FusedHead, NoRowsIsNoWork) {
  for (at::ScalarType dtype : {at::kFloat, at::kBFloat16}) {
    const Case made = make_case(0, 8, 33, dtype);
    EXPECT_EQ(announced_bytes(0, 33, 8, dtype), 0);
    Arena arena(kArenaBytes);
    const HeadGradients out = {at::empty_like(made.hidden), at::ones({33, 8})};
    head_forward(made.problem(), {}, {}, arena);
    add_head_backward(made.problem(), {}, {}, out, arena);
    EXPECT_EQ(arena.high_water(), 0);
    EXPECT_TRUE(out.grad_weight_VM.equal(at::ones({33, 8})));
  }
}

TEST(FusedHead, RefusesEdgesOutOfOrderOrOfRange) {
  Case made = make_case(3, 8, 33, at::kFloat);
  Arena arena(kArenaBytes);
  std::vector<double> series(2);
  made.edges = {{2, 0}, {1, 0}};
  EXPECT_THROW(head_forward(made.problem(), series, series, arena), InternalError);
  made.edges = {{1, 0}, {1, 33}};
  EXPECT_THROW(head_forward(made.problem(), series, series, arena), InternalError);
  made.edges = {{1, 0}, {3, 0}};
  EXPECT_THROW(head_forward(made.problem(), series, series, arena), InternalError);
  const std::vector<std::int32_t> set{0, 4};
  made.edges = {{1, 0, set}, {1, 0}};
  EXPECT_THROW(head_forward(made.problem(), series, series, arena), InternalError)
      << "the whole vocabulary comes first";
}

TEST(HeadGradient, Float64AgreesWithAutograd) {
  for (std::int64_t vocabulary : {3, 64, 1031})
    for (bool with_entropy : {false, true})
      for (bool one_pass : {false, true}) {
        const Case made = make_case(23, 16, vocabulary, at::kDouble, 2, with_entropy);
        const Gradients expected = plain_gradients(made, at::kDouble), got = fused_gradients(made, one_pass);
        EXPECT_LT(relative(got.hidden, expected.hidden), 1e-12) << vocabulary << with_entropy << one_pass;
        EXPECT_LT(relative(got.weight, expected.weight), 1e-12) << vocabulary << with_entropy << one_pass;
        EXPECT_EQ(got.hidden[0].abs().max().item<double>(), 0.0);  // a row without edges is overwritten with zeros
      }
}

TEST(HeadGradient, Float64AgreesWithAutogradOverKeptSets) {
  for (std::int64_t vocabulary : {3, 64, 1031})
    for (bool one_pass : {false, true}) {
      const Case made = make_kept_case(23, 16, vocabulary, at::kDouble, 2);
      const Gradients expected = plain_gradients(made, at::kDouble), got = fused_gradients(made, one_pass);
      EXPECT_LT(relative(got.hidden, expected.hidden), 1e-12) << vocabulary << one_pass;
      EXPECT_LT(relative(got.weight, expected.weight), 1e-12) << vocabulary << one_pass;
    }
  // Blocks of 256 rows have the sets of their own rows.
  const Case made = make_kept_case(600, 8, 37, at::kDouble, 2);
  const Gradients expected = plain_gradients(made, at::kDouble), got = fused_gradients(made, true);
  EXPECT_LT(relative(got.hidden, expected.hidden), 1e-12);
  EXPECT_LT(relative(got.weight, expected.weight), 1e-12);
}

TEST(HeadGradient, LogitsOutsideAllKeptSetsHaveNone) {
  Case made = make_case(2, 4, 9, at::kFloat, 2);  // the second row has one edge
  made.sets = {{1, 7, 8}};
  made.edges.at(0) = {1, 7, made.sets[0]};
  const Gradients got = fused_gradients(made, true);
  for (std::int64_t v = 0; v < 9; ++v)
    EXPECT_EQ(got.weight[v].abs().max().item<double>() == 0.0, v != 1 && v != 7 && v != 8) << v;
}

TEST(HeadGradient, LowerDtypesAreNoWorseThanTwiceThePlainOnes) {
  for (at::ScalarType dtype : {at::kFloat, at::kBFloat16})
    for (bool with_entropy : {false, true}) {
      const Case made =
          with_entropy ? make_kept_case(80, 64, 1537, dtype, 2) : make_case(80, 64, 1537, dtype, 2, with_entropy);
      const Gradients exact = plain_gradients(made, at::kDouble), plain = plain_gradients(made, dtype);
      const Gradients got = fused_gradients(made, true);
      EXPECT_LE(relative(got.hidden, exact.hidden), 2 * relative(plain.hidden, exact.hidden)) << dtype << with_entropy;
      EXPECT_LE(relative(got.weight, exact.weight), 2 * relative(plain.weight, exact.weight)) << dtype << with_entropy;
    }
}

TEST(HeadGradient, SeveralBlocksAndWideBfloat16RunsJoin) {
  {
    const Case made = make_case(600, 8, 37, at::kDouble, 2);  // three blocks of 256 rows
    const Gradients expected = plain_gradients(made, at::kDouble), got = fused_gradients(made, true);
    EXPECT_LT(relative(got.hidden, expected.hidden), 1e-12);
    EXPECT_LT(relative(got.weight, expected.weight), 1e-12);
  }
  const Case made = make_case(9, 1024, 5001, at::kBFloat16, 2);  // 16 MiB hold 4096 of 5001 widened rows
  const Gradients exact = plain_gradients(made, at::kDouble), got = fused_gradients(made, true);
  // grad_hidden is rounded once to bfloat16 (2^-9); grad_weight stays in float32.
  EXPECT_LT(relative(got.hidden, exact.hidden), 1.0 / 512);
  EXPECT_LT(relative(got.weight, exact.weight), 1e-5);
}

TEST(HeadGradient, WeightGradientIsAddedTo) {
  const Case made = make_case(12, 8, 37, at::kDouble, 2);
  const Gradients once = fused_gradients(made, false);
  const HeadGradients out = {at::empty_like(made.hidden), at::ones(made.weight.sizes(), at::kDouble)};
  Arena arena(kArenaBytes);
  for (int time = 0; time < 2; ++time)
    add_head_backward(made.problem(), made.grad_logprob, made.grad_entropy, out, arena);
  EXPECT_LT(relative(out.grad_weight_VM, 1 + 2 * once.weight), 1e-14);
}

TEST(HeadGradient, AgreesWithCentralDifferences) {
  Case made = make_case(6, 5, 11, at::kDouble, 2);
  const Gradients got = fused_gradients(made, false);
  const auto loss = [&] {
    const Values values = fused_values(made);
    double sum = 0;
    for (std::size_t e = 0; e < made.edges.size(); ++e)
      sum += made.grad_logprob[e] * values.logprob[e] + made.grad_entropy[e] * values.entropy[e];
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
    Case made = make_case(8, 16, 101, dtype, 2);
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
