// The oracle itself: its gradient against central differences of its loss, so that agreement with it means something.
#include <ATen/core/Tensor.h>
#include <ATen/ops/dot.h>
#include <ATen/ops/zeros_like.h>
#include <gtest/gtest.h>

#include "espalier/base/random.h"
#include "espalier/data/training_data.h"
#include "espalier/ops/dispatch.h"
#include "tests/equivalence/fixture.h"

namespace espalier::testing {
namespace {

void expect_gradient_is_slope(const std::vector<const char*>& families, bool critic) {
  for (const char* family : families) {
    const auto model = tiny_model(family, DType::float64, 5, critic);
    RolloutOptions rollout_options;
    rollout_options.groups = 2;
    rollout_options.policy = PolicyAge::near_old;
    rollout_options.values = critic;
    Options options = test_options();
    options.kl_loss_coef = 0.1, options.entropy_coeff = 0.01;
    TrainingData data(make_rollouts(rollout_options, 5), options, critic);
    if (critic) data.prepare(0, {});
    const MiniBatch batch = data.mini_batch(0);
    const Merged whole = merged(*model);
    const at::Tensor& own = whole.weights;
    const auto at_weights = [&](const at::Tensor& weights) {
      return critic ? value_oracle(model->shape, whole.table, weights, batch.rollouts, batch.targets, options)
                    : oracle(model->shape, whole.table, weights, batch.rollouts, batch.advantages, options);
    };
    const auto loss_at = [&](const at::Tensor& weights) { return at_weights(weights).loss; };
    const at::Tensor gradient = at_weights(own).gradient;
    Random random(7);
    for (const Parameter& trained : model->table.parameters()) {
      const Parameter& p = whole.table.at(trained.name);
      const auto expert = p.name.find(".experts.");  // two of the eight: they are alike
      if (expert != std::string::npos && p.name[expert + 9] > '1') continue;
      // Along a random direction: central differences err by h^2 f''' / 6 + 1e-16 f / h, about 1e-9 for h = 1e-5.
      constexpr double kStep = 1e-5;
      at::Tensor direction = at::zeros_like(own);
      for (std::int64_t i = 0; i < p.count; ++i) pointer<double>(direction)[p.offset + i] = random.normal();
      direction /= direction.norm();
      const double slope = (loss_at(own + kStep * direction) - loss_at(own - kStep * direction)) / (2 * kStep);
      EXPECT_NEAR(at::dot(gradient, direction).item<double>(), slope, 1e-7) << family << " " << p.name;
    }
  }
}

TEST(Oracle, GradientIsTheSlopeOfItsLoss) {
  expect_gradient_is_slope({"llama", "llama-bias", "qwen2", "qwen3", "qwen3-window", "qwen3-moe", "qwen3-next",
                            "qwen3-next-plain", "DeepseekV2", "DeepseekV3"},
                           false);
}

// Its blocks are the same as above.
TEST(Oracle, GradientOfACriticIsTheSlopeOfItsLoss) { expect_gradient_is_slope({"llama-bias"}, true); }

}  // namespace
}  // namespace espalier::testing
