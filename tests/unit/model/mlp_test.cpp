// The second half of a block without experts, beside autograd.
#include "espalier/model/mlp.h"

#include <gtest/gtest.h>

#include "tests/support/layers.h"
#include "tests/unit/model/one_layer.h"

namespace espalier::testing {
namespace {

using at::Tensor;

ModelShape dense_shape() {
  ModelShape shape;
  shape.architecture = "LlamaForCausalLM";
  shape.hidden = 6, shape.vocabulary = 5, shape.max_positions = 8;
  shape.layer = attention_layers(1, {.heads = 2, .kv_heads = 1, .head_dim = 4}, 7);
  return shape;
}

struct MlpCase {
  const char* name;
  std::function<void(ModelShape&)> edit;
};
void PrintTo(const MlpCase& c, std::ostream* out) { *out << c.name; }

class Mlp : public ::testing::TestWithParam<MlpCase> {
 protected:
  Mlp() : one_(shape_of(GetParam()), 5) {
    one_.saved.stream_mid_RM = one_.stream.clone();
    take_mlp_saved(one_.context(), one_.saved);
  }
  static ModelShape shape_of(const MlpCase& c) {
    ModelShape shape = dense_shape();
    c.edit(shape);
    return shape;
  }
  const ModelShape& shape() const { return one_.model.shape; }

  OneLayer one_;
};

TEST_P(Mlp, ForwardAndBackwardAreThoseOfAutograd) {
  LayerViews leaves = one_.leaves();
  const Tensor y = one_.stream.clone().requires_grad_(), grad = at::randn_like(y);
  const Tensor expected = plain_dense_mlp(y, leaves, shape());
  (expected * grad).sum().backward();

  const Tensor out = at::empty_like(one_.stream);
  mlp_forward(one_.context(), one_.saved, out);
  EXPECT_LE(distance(out, expected.detach()), kSumsOfOneLayer);
  EXPECT_TRUE(one_.saved.stream_mid_RM.equal(one_.stream)) << "the forward changed what it read";

  const Tensor grad_stream = grad.clone();
  add_mlp_backward(one_.context(), one_.saved, grad_stream, one_.gradient());
  EXPECT_LE(distance(grad_stream, y.grad()), kSumsOfOneLayer);
  EXPECT_LE(one_.distance_from(leaves), kSumsOfOneLayer);
}

TEST_P(Mlp, ComputesAgainWhatTheForwardSaved) {
  const Tensor out = at::empty_like(one_.stream);
  mlp_forward(one_.context(), one_.saved, out);
  const LayerSaved first = one_.saved;
  one_.saved = {};
  one_.saved.stream_mid_RM = first.stream_mid_RM;
  take_mlp_saved(one_.context(), one_.saved);
  mlp_forward(one_.context(), one_.saved, Tensor());
  EXPECT_TRUE(one_.saved.gate_up_RW.equal(first.gate_up_RW));
  for (const auto member : {&LayerSaved::mlp_rstd_R, &LayerSaved::mlp_branch_RM, &LayerSaved::mlp_branch_rstd_R}) {
    ASSERT_EQ((one_.saved.*member).defined(), (first.*member).defined());
    if ((first.*member).defined()) {
      EXPECT_TRUE((one_.saved.*member).equal(first.*member));
    }
  }
}

TEST_P(Mlp, AddsToTheGradientsThatStandThere) {
  const Tensor out = at::empty_like(one_.stream), grad = at::randn_like(out);
  const LayerSaved start = one_.saved;
  const auto backward = [&] {
    one_.saved = start;
    mlp_forward(one_.context(), one_.saved, out);
    add_mlp_backward(one_.context(), one_.saved, grad.clone(), one_.gradient());
  };
  backward();
  const Tensor once = one_.gradients->flat().clone();
  backward();
  EXPECT_LE(distance(one_.gradients->flat(), 2 * once), kSumsOfOneLayer);
}

INSTANTIATE_TEST_SUITE_P(
    Blocks, Mlp,
    ::testing::Values(MlpCase{"before", [](ModelShape&) {}},
                      MlpCase{"after", [](ModelShape& shape) { set_norm_place(shape, NormPlace::after); }},
                      MlpCase{"both", [](ModelShape& shape) { set_norm_place(shape, NormPlace::both); }},
                      MlpCase{"scaled", [](ModelShape& shape) { shape.scales.residual = 0.5; }},
                      MlpCase{"biases",
                              [](ModelShape& shape) {
                                shape.mlp_bias = true;
                                shape.activation.kind = Activation::gelu_tanh;
                              }},
                      MlpCase{"withoutAGate",
                              [](ModelShape& shape) {
                                shape.activation = {Activation::relu_squared, 0, false};
                                shape.scales.residual = 2;
                              }}),
    [](const auto& info) { return info.param.name; });

TEST(MlpOfHalfBlocks, PassesTheStreamOnWhereTheLayerEndsWithItsMixer) {
  ModelShape shape = dense_shape();
  shape.layer[0].mlp = MlpKind::none;
  OneLayer one(shape, 3);
  one.saved.stream_mid_RM = one.stream.clone();
  const Tensor out = at::zeros_like(one.stream), grad = at::randn_like(out), before = grad.clone();
  mlp_forward(one.context(), one.saved, out);
  EXPECT_TRUE(out.equal(one.stream));
  add_mlp_backward(one.context(), one.saved, grad, one.gradient());
  EXPECT_TRUE(grad.equal(before));
}

TEST(FrozenMlp, HasNoGradientAndPassesTheRowsOn) {
  ModelShape shape = dense_shape();
  OneLayer one(shape, 4);
  one.saved.stream_mid_RM = one.stream.clone();
  take_mlp_saved(one.context(), one.saved);
  const Tensor out = at::empty_like(one.stream), grad = at::randn_like(out), grad_stream = grad.clone();
  mlp_forward(one.context(), one.saved, out);
  LayerViews nothing = one.gradient();
  nothing.gate_up = nothing.down = {};
  LayerViews leaves = one.leaves();
  const Tensor y = one.stream.clone().requires_grad_();
  (plain_dense_mlp(y, leaves, shape) * grad).sum().backward();
  add_mlp_backward(one.context(), one.saved, grad_stream, nothing);
  EXPECT_LE(distance(grad_stream, y.grad()), kSumsOfOneLayer);
  EXPECT_EQ(one.gradient().down.weight.abs().max().item<double>(), 0);
  EXPECT_LE(distance(one.gradient().mlp_norm_M, leaves.mlp_norm_M.grad()), kSumsOfOneLayer);
}

}  // namespace
}  // namespace espalier::testing
