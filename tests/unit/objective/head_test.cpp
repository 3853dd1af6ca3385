// The fused head against log_softmax written with plain tensor operations in float64 (the same inputs), and its
// bookkeeping: scratch bytes, order of the callback, blocks, empty cases. Derivatives: tests/gradcheck/objective.
#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <cmath>
#include <thread>
#include <vector>

#include "espalier/base/error.h"
#include "espalier/base/instruction_set.h"
#include "espalier/device/scalar_type.h"
#include "espalier/objective/fused_head.h"
#include "espalier/ops/cpu/head_kernels.h"
#include "espalier/plan/block_buffers.h"

namespace espalier {
namespace {

constexpr std::int64_t kArenaBytes = std::int64_t{1} << 30;

struct Case {
  at::Tensor hidden, weight;
  std::vector<double> temperature;
  std::vector<HeadEdge> edges;

  HeadProblem problem() const {
    ControlBlock block;
    handed_over = {};
    handed_over.add_to(block, temperature, edges, weight.size(0));
    block.hand_over(cpu_device());
    return {hidden, weight, handed_over};
  }
  mutable HeadEdges handed_over = {};
};

// Rows with 0, 1, 2, 0, 1, 2, ... edges; every second pair of edges repeats its target.
Case make_case(std::int64_t outputs, std::int64_t width, std::int64_t vocabulary, at::ScalarType dtype,
               double scale = 1) {
  at::manual_seed(1);
  Case made;
  made.hidden = (at::randn({outputs, width}, at::kDouble) * scale).to(dtype);
  made.weight = (at::randn({vocabulary, width}, at::kDouble) / std::sqrt(static_cast<double>(width))).to(dtype);
  for (std::int64_t o = 0; o < outputs; ++o) {
    made.temperature.push_back(o % 3 == 1 ? 0.7 : 1.0);
    for (std::int64_t e = 0; e < o % 3; ++e)
      made.edges.push_back(
          {static_cast<std::int32_t>(o), static_cast<std::int32_t>((o * 7 + e * (o % 2)) % vocabulary)});
  }
  return made;
}

struct Reference {
  std::vector<double> logprob, entropy;
};

// In `dtype`, with nothing of the code under test: the whole logits, log_softmax, sums.
Reference plain_head(const Case& made, at::ScalarType dtype) {
  const at::Tensor temperature =
      at::tensor(made.temperature, at::kDouble).to(dtype == at::kBFloat16 ? at::kFloat : dtype).unsqueeze(1);
  const at::Tensor logits = made.hidden.to(dtype).mm(made.weight.to(dtype).t());
  const at::Tensor z = (dtype == at::kBFloat16 ? logits.to(at::kFloat) : logits) / temperature;
  const at::Tensor log_p = at::log_softmax(z, 1);
  const at::Tensor entropy = -(log_p.exp() * log_p).sum(1);
  Reference reference;
  for (const HeadEdge& edge : made.edges) {
    reference.logprob.push_back(log_p[edge.output][edge.target].to(at::kDouble).item<double>());
    reference.entropy.push_back(entropy[edge.output].to(at::kDouble).item<double>());
  }
  return reference;
}

Reference fused_head(const Case& made) {
  Arena arena(kArenaBytes);
  Reference result{std::vector<double>(made.edges.size(), 1e300), std::vector<double>(made.edges.size(), 1e300)};
  head_forward(made.problem(), result.logprob, result.entropy, arena);
  return result;
}

double distance(const std::vector<double>& a, const std::vector<double>& b) {
  double sum = 0;
  for (std::size_t i = 0; i < a.size(); ++i) sum += (a[i] - b[i]) * (a[i] - b[i]);
  return std::sqrt(sum);
}

TEST(FusedHead, Float64AgreesWithLogSoftmax) {
  for (std::int64_t vocabulary : {1, 2, 7, 64, 1023, 1025, 4099}) {
    const Case made = make_case(17, 24, vocabulary, at::kDouble);
    const Reference expected = plain_head(made, at::kDouble), got = fused_head(made);
    for (std::size_t e = 0; e < made.edges.size(); ++e) {
      // Sums of 24 products and of some thousand exponentials, in another order: some dozen units in the last place.
      EXPECT_NEAR(got.logprob[e], expected.logprob[e], 1e-12 * (1 + std::abs(expected.logprob[e]))) << vocabulary;
      EXPECT_NEAR(got.entropy[e], expected.entropy[e], 1e-12 * (1 + expected.entropy[e])) << vocabulary;
    }
  }
}

TEST(FusedHead, LowerDtypesAreNoWorseThanTwiceThePlainOnes) {
  for (at::ScalarType dtype : {at::kFloat, at::kBFloat16})
    for (double scale : {1.0, 30.0}) {
      const Case made = make_case(60, 96, 1537, dtype, scale);
      const Reference exact = plain_head(made, at::kDouble), plain = plain_head(made, dtype), got = fused_head(made);
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
    const Reference got = fused_head(made);
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
      const HeadGradients out = {at::empty_like(made.hidden),
                                 at::zeros({vocabulary, width}, dtype == at::kDouble ? at::kDouble : at::kFloat)};
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
  const Reference got = fused_head(made);
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
  const Reference expected = fused_head(made);
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
}

}  // namespace
}  // namespace espalier
