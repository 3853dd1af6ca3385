// A mixture of experts as the second half of a block, beside autograd.
#include "espalier/model/expert_mlp.h"

#include <ATen/ops/index_select.h>
#include <gtest/gtest.h>

#include <cmath>

#include "espalier/config/family_names.h"
#include "tests/support/layers.h"
#include "tests/unit/model/one_layer.h"

namespace espalier::testing {
namespace {

using at::Tensor;

constexpr std::int64_t kRows = 9, kExperts = 4, kPerToken = 2;

ModelShape expert_shape() {
  ModelShape shape;
  shape.architecture = "Qwen3MoeForCausalLM";
  shape.hidden = 6, shape.vocabulary = 5, shape.max_positions = 8;
  shape.experts = kExperts, shape.experts_per_token = kPerToken, shape.expert_inner = 3;
  shape.norm_topk_prob = true;
  // The first layer is dense: numbers of expert layers are not numbers of layers.
  shape.layer = attention_layers(2, {.heads = 2, .kv_heads = 1, .head_dim = 4}, 7);
  set_experts(shape, {0, 1});
  return shape;
}

// As Gemma 4 26B-A4B.
void set_apart(ModelShape& shape) {
  shape.names = kGemma4Names;
  shape.shared_expert = {.inner = 5, .apart = true};
  shape.router.expert_scale = true;
  for (LayerShape& layer : shape.layer) layer.norm_place = NormPlace::both;
}

Tensor plain_expert(const Tensor& x, const Tensor& gate_up_WM, const Tensor& down_MF, const ModelShape& shape) {
  return plain_activation(shape.activation, x.mm(gate_up_WM.t())).mm(down_MF.t());
}

// The block's second half with the experts `choice` [R, k].
Tensor plain_experts(const Tensor& y, const LayerViews& w, const ModelShape& shape, const Tensor& choice) {
  const Tensor normed = plain_norm(y, w.mlp_norm_M, shape.rms_norm_eps), logits = plain_product(normed, w.router);
  const Tensor scores = shape.router.sigmoid ? logits.sigmoid() : logits.softmax(1);
  Tensor weight = scores.gather(1, choice);
  if (shape.norm_topk_prob) weight = weight / weight.sum(1, true);
  weight = weight * shape.router.scaling;
  Tensor sum = at::zeros_like(y);
  for (std::int64_t e = 0; e < shape.experts; ++e) {
    const Tensor of_expert = (weight * (choice == e)).sum(1, true);  // 0 for rows that did not choose it
    sum = sum + of_expert * plain_expert(normed, w.expert_gate_up_EWM[e], w.expert_down_EMF[e], shape);
  }
  if (shape.shared_expert.inner > 0) {
    const Tensor shared = plain_expert(normed, w.shared_gate_up.weight, w.shared_down.weight, shape);
    sum = sum + (shape.shared_expert.gate ? plain_product(normed, w.shared_expert_gate).sigmoid() * shared : shared);
  }
  return y + shape.scales.residual * sum;
}

// The same with norms apart.
Tensor plain_apart(const Tensor& y, const LayerViews& w, const ModelShape& shape, const Tensor& choice) {
  const auto normed = [&](const Tensor& x, const Tensor& weight_M) {
    return plain_norm(x, weight_M, shape.rms_norm_eps);
  };
  const Tensor rows = normed(y, w.apart.experts_M),
               logits =
                   plain_product(normed(y, w.apart.router_M) / std::sqrt(static_cast<double>(shape.hidden)), w.router);
  Tensor weight = logits.softmax(1).gather(1, choice);
  weight = weight / weight.sum(1, true) * w.expert_scale_E.index_select(0, choice.reshape(-1)).view(choice.sizes());
  Tensor sum = at::zeros_like(y);
  for (std::int64_t e = 0; e < shape.experts; ++e)
    sum = sum + (weight * (choice == e)).sum(1, true) *
                    plain_expert(rows, w.expert_gate_up_EWM[e], w.expert_down_EMF[e], shape);
  const Tensor shared = plain_expert(normed(y, w.mlp_norm_M), w.shared_gate_up.weight, w.shared_down.weight, shape);
  return y + normed(normed(shared, w.apart.behind_shared_M) + normed(sum, w.apart.behind_experts_M), w.mlp_post_norm_M);
}

struct ExpertCase {
  const char* name;
  std::function<void(ModelShape&)> edit;
  bool given = false;  // every second row is given its experts
};
void PrintTo(const ExpertCase& c, std::ostream* out) { *out << c.name; }

class ExpertMlp : public ::testing::TestWithParam<ExpertCase> {
 protected:
  ExpertMlp() : one_(shape_of(GetParam()), kRows, {}, 1) {
    if (GetParam().given) {
      given_ = at::full({1, kRows, kPerToken}, -1, at::kInt);
      for (std::int64_t row = 0; row < kRows; row += 2) given_[0][row][0] = 3, given_[0][row][1] = row % 3;
      one_.input.given_LTK = given_;
    }
    one_.saved.stream_mid_RM = one_.stream.clone();
    take_mlp_saved(one_.context(), one_.saved);
  }
  static ModelShape shape_of(const ExpertCase& c) {
    ModelShape shape = expert_shape();
    c.edit(shape);
    return shape;
  }
  const ModelShape& shape() const { return one_.model.shape; }
  // The k largest scores, with the correction, or those that are given.
  Tensor expected_choice(const LayerViews& w) const {
    const bool apart = shape().shared_expert.apart;
    const Tensor& norm_M = apart ? w.apart.router_M : w.mlp_norm_M;
    Tensor logits = plain_product(plain_norm(one_.stream, norm_M, shape().rms_norm_eps), w.router);
    Tensor scores = shape().router.sigmoid ? logits.sigmoid() : logits.softmax(1);
    if (w.correction_bias_E.defined()) scores = scores + w.correction_bias_E;
    Tensor choice = std::get<1>(scores.topk(kPerToken, 1));
    if (given_.defined()) choice = at::where(given_[0].slice(1, 0, 1) >= 0, given_[0].to(at::kLong), choice);
    return choice.detach();
  }

  void expect_autograd();
  void expect_the_same_again();

  OneLayer one_;
  Tensor given_;
};
class ApartExperts : public ExpertMlp {};

void ExpertMlp::expect_autograd() {
  LayerViews leaves = one_.leaves();
  const Tensor y = one_.stream.clone().requires_grad_(), grad = at::randn_like(y), choice = expected_choice(leaves);
  const Tensor expected = (shape().shared_expert.apart ? plain_apart : plain_experts)(y, leaves, shape(), choice);
  (expected * grad).sum().backward();

  const Tensor out = at::empty_like(one_.stream);
  expert_mlp_forward(one_.context(), one_.saved, out);
  EXPECT_TRUE(std::get<0>(one_.saved.router_choice_RK.to(at::kLong).sort(1)).equal(std::get<0>(choice.sort(1))));
  EXPECT_LE(distance(out, expected.detach()), kSumsOfOneLayer);

  const Tensor grad_stream = grad.clone();
  add_expert_mlp_backward(one_.context(), one_.saved, grad_stream, one_.gradient());
  EXPECT_LE(distance(grad_stream, y.grad()), kSumsOfOneLayer);
  EXPECT_LE(one_.distance_from(leaves), kSumsOfOneLayer);
}

void ExpertMlp::expect_the_same_again() {
  expert_mlp_forward(one_.context(), one_.saved, at::empty_like(one_.stream));
  const LayerSaved first = one_.saved;
  one_.saved = {};
  one_.saved.stream_mid_RM = first.stream_mid_RM;
  take_mlp_saved(one_.context(), one_.saved);
  expert_mlp_forward(one_.context(), one_.saved, Tensor());
  for (const auto member :
       {&LayerSaved::gate_up_RW, &LayerSaved::mlp_rstd_R, &LayerSaved::router_logits_RE, &LayerSaved::router_choice_RK,
        &LayerSaved::router_weight_RK, &LayerSaved::shared_gate_up_RW, &LayerSaved::shared_logit_R1,
        &LayerSaved::shared_weight_R1, &LayerSaved::plain_weight_RK, &LayerSaved::shared_branch_RM,
        &LayerSaved::shared_branch_rstd_R, &LayerSaved::expert_branch_RM, &LayerSaved::expert_branch_rstd_R,
        &LayerSaved::mlp_branch_RM, &LayerSaved::mlp_branch_rstd_R})
    if ((first.*member).defined()) {
      EXPECT_TRUE((one_.saved.*member).equal(first.*member));
    }
}

TEST_P(ExpertMlp, ForwardAndBackwardAreThoseOfAutograd) { expect_autograd(); }
TEST_P(ExpertMlp, ComputesAgainWhatTheForwardSaved) { expect_the_same_again(); }
TEST_P(ApartExperts, ForwardAndBackwardAreThoseOfAutograd) { expect_autograd(); }
TEST_P(ApartExperts, ComputeAgainWhatTheForwardSaved) { expect_the_same_again(); }

INSTANTIATE_TEST_SUITE_P(Blocks, ApartExperts,
                         ::testing::Values(ExpertCase{"chosen", set_apart}, ExpertCase{"given", set_apart, true}),
                         [](const auto& info) { return info.param.name; });
INSTANTIATE_TEST_SUITE_P(
    Blocks, ExpertMlp,
    ::testing::Values(ExpertCase{"renormalised", [](ModelShape&) {}},
                      ExpertCase{"asTheyAre", [](ModelShape& shape) { shape.norm_topk_prob = false; }},
                      ExpertCase{"given", [](ModelShape& shape) { shape.scales.residual = 0.5; }, true},
                      ExpertCase{"sigmoid",
                                 [](ModelShape& shape) {
                                   shape.router.sigmoid = shape.router.correction_bias = true;
                                   shape.router.scaling = 2.5;
                                 }},
                      ExpertCase{"shared",
                                 [](ModelShape& shape) {
                                   shape.shared_expert = {5, false};
                                   shape.scales.residual = 0.5;
                                 }},
                      ExpertCase{"sharedWithAGate",
                                 [](ModelShape& shape) {
                                   shape.shared_expert = {5, true};
                                 }}),
    [](const auto& info) { return info.param.name; });

// The block's gradient with penalties is that of the loss plus their values.
TEST(ExpertMlpPenalties, AreAddedToTheGradientAndTheirValuesToTheRun) {
  OneLayer one(expert_shape(), kRows, {}, 1);
  RouterPenalties penalties;
  penalties.of_layer = {
      {at::zeros({kRows}, at::kInt), at::rand({1, kExperts}, at::kDouble), at::full({1}, 0.3, at::kDouble)}};
  penalties.value_L2 = at::zeros({1, 2}, at::kDouble);
  const LayerContext c = one.context(false, &penalties);
  LayerViews leaves = one.leaves();
  const Tensor y = one.stream.clone().requires_grad_();
  const Tensor logits = plain_product(plain_norm(y, leaves.mlp_norm_M, c.shape.rms_norm_eps), leaves.router);
  const Tensor auxiliary = (logits.softmax(1) * penalties.of_layer[0].probability_GE).sum();
  const Tensor z = 0.3 * logits.logsumexp(1).square().sum();
  (auxiliary + z).backward();

  one.saved.stream_mid_RM = one.stream.clone();
  take_mlp_saved(c, one.saved);
  expert_mlp_forward(c, one.saved, at::empty_like(one.stream));
  const Tensor grad_stream = at::zeros_like(one.stream);
  add_expert_mlp_backward(c, one.saved, grad_stream, one.gradient());
  EXPECT_LE(distance(grad_stream, y.grad()), kSumsOfOneLayer);
  EXPECT_LE(distance(one.gradient().router.weight, leaves.router.weight.grad()), kSumsOfOneLayer);
  EXPECT_LE(distance(penalties.value_L2.flatten(), at::stack({auxiliary, z}).detach()), kSumsOfOneLayer);
}

}  // namespace
}  // namespace espalier::testing
