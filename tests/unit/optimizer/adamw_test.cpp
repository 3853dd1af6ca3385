// AdamW over a model's flat buffer against its formula, one number at a time.
#include "espalier/optimizer/adamw.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/equal.h>
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <numbers>
#include <vector>

#include "espalier/base/error.h"
#include "espalier/mixers/attention/shape.h"
#include "tests/support/in_process.h"

namespace espalier {
namespace {

ModelShape small_shape() {
  ModelShape shape;
  shape.architecture = "LlamaForCausalLM";
  shape.vocabulary = 11, shape.hidden = 8;
  shape.layer = attention_layers(2, {.heads = 2, .kv_heads = 1, .head_dim = 4}, 12);
  return shape;
}

at::Tensor numbers_like(const ParameterTable& table, double phase) {
  return (at::arange(table.size(), at::kDouble) * 0.37 + phase).sin();
}

struct Reference {
  std::vector<double> p, m, v;

  void step(const at::Tensor& gradient, const AdamWSettings& s, const ParameterTable& table, std::int64_t t) {
    const double norm = gradient.norm().item<double>(), lr = learning_rate(s, t);
    for (const Parameter& parameter : table.parameters())
      for (std::int64_t i = parameter.offset; i < parameter.offset + parameter.count; ++i) {
        const auto at = static_cast<std::size_t>(i);
        const double g = gradient[i].item<double>() * clip_factor(norm, s.max_grad_norm);
        if (!s.decay_matrices_only || parameter.shape.size() > 1) p[at] *= 1 - lr * s.weight_decay;
        m[at] = s.beta1 * m[at] + (1 - s.beta1) * g, v[at] = s.beta2 * v[at] + (1 - s.beta2) * g * g;
        const double corrected = std::sqrt(v[at] / (1 - std::pow(s.beta2, t)));
        p[at] -= lr * m[at] / (1 - std::pow(s.beta1, t)) / (corrected + s.eps);
      }
  }
};

TEST(AdamW, StepsAreThoseOfTheFormula) {
  const ParameterTable table(small_shape(), Parameters::trained);
  for (const bool matrices_only : {false, true})
    for (const double max_norm : {0.0, 0.5}) {
      AdamWSettings settings;
      settings.lr = 1e-2, settings.weight_decay = 0.1, settings.decay_matrices_only = matrices_only;
      settings.max_grad_norm = max_norm, settings.warmup_steps = 1;
      const at::Tensor weights = numbers_like(table, 1);
      Reference reference{{weights.data_ptr<double>(), weights.data_ptr<double>() + table.size()},
                          std::vector<double>(static_cast<std::size_t>(table.size())),
                          std::vector<double>(static_cast<std::size_t>(table.size()))};
      AdamW optimizer(table, weights, settings, cpu_device());
      for (std::int64_t t = 1; t <= 4; ++t) {
        const at::Tensor gradient = numbers_like(table, 10 + static_cast<double>(t)) * static_cast<double>(t);
        const AdamW::Update update = optimizer.step(gradient);
        EXPECT_DOUBLE_EQ(update.lr, learning_rate(settings, t));
        EXPECT_NEAR(update.grad_norm, gradient.norm().item<double>(), 1e-12 * update.grad_norm);
        reference.step(gradient, settings, table, t);
      }
      // A number is about 1; four steps round it some tens of times.
      for (std::int64_t i = 0; i < table.size(); ++i)
        ASSERT_NEAR(weights[i].item<double>(), reference.p[static_cast<std::size_t>(i)], 1e-14) << i;
    }
}

TEST(AdamW, AGradientThatIsNoNumberChangesNothing) {
  const ParameterTable table(small_shape(), Parameters::trained);
  const at::Tensor weights = numbers_like(table, 1), before = weights.clone();
  AdamW optimizer(table, weights, {.lr = 1e-2}, cpu_device());
  at::Tensor gradient = numbers_like(table, 2);
  gradient[3] = std::numeric_limits<double>::infinity();
  EXPECT_THROW(optimizer.step(gradient), InputError);
  EXPECT_TRUE(at::equal(weights, before));
  EXPECT_EQ(optimizer.steps_done(), 0);
  EXPECT_EQ(optimizer.exp_avg().count_nonzero().item<std::int64_t>(), 0);
}

TEST(AdamW, RatesFollowTheirSchedule) {
  AdamWSettings s;
  s.lr = 2, s.warmup_steps = 4, s.total_steps = 12, s.min_lr_ratio = 0.1;
  EXPECT_EQ(learning_rate(s, 1), 0);
  EXPECT_EQ(learning_rate(s, 3), 1);
  EXPECT_EQ(learning_rate(s, 5), 2) << "constant";
  s.schedule = LrSchedule::linear;
  EXPECT_DOUBLE_EQ(learning_rate(s, 9), 2 * (0.1 + 0.9 * 0.5));
  EXPECT_DOUBLE_EQ(learning_rate(s, 100), 2 * 0.1);
  s.schedule = LrSchedule::cosine;
  EXPECT_DOUBLE_EQ(learning_rate(s, 7), 2 * (0.1 + 0.9 * (1 + std::cos(std::numbers::pi * 0.25)) / 2));
}

TEST(AdamW, ASharedStateMovesTheSameWeights) {
  const ParameterTable table(small_shape(), Parameters::trained);
  const at::Tensor alone = numbers_like(table, 1), gradient = numbers_like(table, 2);
  AdamW(table, alone, {.lr = 1e-2}, cpu_device()).step(gradient);
  run_ranks({.dp = 3}, [&](const Mesh& mesh) {
    const ParameterTable own(LocalShape(small_shape(), mesh.degrees, mesh.place()), Parameters::trained);
    const at::Tensor weights = numbers_like(own, 1);
    AdamW optimizer(own, weights, {.lr = 1e-2}, cpu_device(), {mesh.dp, mesh.world});
    optimizer.step(gradient);
    EXPECT_TRUE(at::equal(weights, alone)) << "rank " << mesh.world.rank();
  });
}

TEST(AdamW, AStepInPiecesHasTheBitsOfOneAtOnce) {
  ModelShape shape = small_shape();
  shape.vocabulary = 140'001;
  const ParameterTable table(shape, Parameters::trained);
  const at::Tensor whole = numbers_like(table, 1).to(at::kFloat), parts = whole.clone(),
                   gradient = numbers_like(table, 2).to(at::kFloat);
  const AdamWSettings settings{.lr = 1e-2, .weight_decay = 0.1, .decay_matrices_only = true};
  AdamW at_once(table, whole, settings, cpu_device()), in_pieces(table, parts, settings, cpu_device());
  int pieces = 0;
  for (int step = 0; step < 2; ++step) {
    at_once.step(gradient, settings);
    in_pieces.step(gradient, settings, [&] { ++pieces; });
  }
  EXPECT_GT(pieces, 2 * 2);
  EXPECT_TRUE(at::equal(whole, parts));
  EXPECT_TRUE(at::equal(at_once.exp_avg_sq(), in_pieces.exp_avg_sq()));
}

TEST(AdamW, RangesOfRanksTakeEveryElementOnce) {
  for (const std::int64_t elements : {0, 1, 5, 7, 1000})
    for (const int ranks : {1, 2, 3, 8}) {
      std::int64_t end = 0;
      for (int rank = 0; rank < ranks; ++rank) {
        const AdamW::Range range = AdamW::range_of(elements, ranks, rank);
        EXPECT_EQ(range.begin, end);
        end = range.end;
      }
      EXPECT_EQ(end, elements) << ranks;
    }
}

}  // namespace
}  // namespace espalier
