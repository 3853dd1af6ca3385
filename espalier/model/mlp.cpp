// The dense MLP: z = y + (f(g) u) Wd^T with [g u] = norm(y) Wgu^T (ActivationRule, branch.h); and the choice between it
// and experts. R rows, M width, F inner width.
#include "espalier/model/mlp.h"

#include <ATen/core/Tensor.h>

#include "espalier/device/held_buffers.h"
#include "espalier/model/branch.h"
#include "espalier/model/expert_mlp.h"
#include "espalier/model/layer_inputs.h"
#include "espalier/model/mlp_buffers.h"

namespace espalier {
namespace {

bool has_experts(const LayerContext& c) { return c.own.has_experts(); }

// The half of a block that ends with down.
Branch branch_of(const LayerContext& c, const LayerSaved& saved) {
  return {c.weights.mlp_post_norm_M, saved.mlp_branch_RM, saved.mlp_branch_rstd_R, c.weights.down};
}

void dense_forward(const LayerContext& c, LayerSaved& saved, const at::Tensor& stream_out_RM) {
  using Stage = DenseForwardBuffers::Stage;
  const DenseForwardBuffers declared(c.block(), saved.stream_mid_RM.size(0), stream_out_RM.defined());
  HeldBuffers held(c.arena, declared, c.dtype());
  held.enter(Stage::up);
  at::Tensor normed_RM = saved.stream_mid_RM;
  if (c.has_norms_before()) {
    normed_RM = held[declared.normed_RM];
    c.ops.norm(saved.stream_mid_RM, c.mlp_norm(c.weights), c.shape.rms_norm_eps, normed_RM, saved.mlp_rstd_R);
  }
  c.products.linear(saved.gate_up_RW, normed_RM, c.weights.gate_up);
  if (!stream_out_RM.defined() && !c.has_norms_after()) return;
  held.enter(Stage::down);
  const at::Tensor& act_RF = held[declared.act_RF];
  c.ops.swiglu(c.shape.activation, saved.gate_up_RW, act_RF);
  add_branch(c, branch_of(c, saved), saved.stream_mid_RM, act_RF, held[declared.branch_RM], stream_out_RM);
}

void add_dense_backward(const LayerContext& c, LayerSaved& saved, const at::Tensor& grad_stream_RM,
                        const LayerViews& grads) {
  using Stage = DenseBackwardBuffers::Stage;
  const DenseBackwardBuffers declared(c.block(), saved.stream_mid_RM.size(0));
  HeldBuffers held(c.arena, declared, c.dtype());
  held.enter(Stage::down);
  const at::Tensor grad_branch_RM =
      add_branch_backward(c, branch_of(c, saved), grad_stream_RM, held[declared.grad_branch_RM], grads.mlp_post_norm_M);
  const at::Tensor act_RF = held[declared.act_RF];  // first holds its own gradient
  c.products.linear_grad_input(act_RF, grad_branch_RM, c.weights.down);
  c.ops.swiglu_backward(c.shape.activation, saved.gate_up_RW, act_RF, saved.gate_up_RW, act_RF);
  c.products.add_linear_grad_weight(grads.down, c.weights.down, grad_branch_RM, act_RF, held[declared.down_product]);
  held.enter(Stage::up);
  const at::Tensor &grad_normed_RM = held[declared.normed_RM],  // until then the rows themselves
      &normed_RM = c.has_norms_before() ? grad_normed_RM : saved.stream_mid_RM;
  if (c.has_norms_before() && grads.gate_up.trains())
    c.ops.norm_again(saved.stream_mid_RM, c.mlp_norm(c.weights), saved.mlp_rstd_R, normed_RM);
  c.products.add_linear_grad_weight(grads.gate_up, c.weights.gate_up, saved.gate_up_RW, normed_RM,
                                    held[declared.gate_up_product]);
  c.products.linear_grad_input(grad_normed_RM, saved.gate_up_RW, c.weights.gate_up);
  c.mesh.tp.add_over_ranks(grad_normed_RM);
  if (c.has_norms_before())
    c.ops.add_norm_backward(saved.stream_mid_RM, c.mlp_norm(c.weights), saved.mlp_rstd_R, grad_normed_RM,
                            grad_stream_RM, c.mlp_norm(grads));
  else
    c.ops.add_scaled(grad_stream_RM, grad_normed_RM, 1, grad_stream_RM);
}

}  // namespace

void mlp_forward(const LayerContext& c, LayerSaved& saved, const at::Tensor& stream_out_RM) {
  if (c.own.mlp == MlpKind::none) {
    if (stream_out_RM.defined() && !stream_out_RM.is_same(saved.stream_mid_RM))
      c.ops.convert(saved.stream_mid_RM, stream_out_RM);
    return;
  }
  const auto mlp = [&](const at::Tensor& out_RM) {
    has_experts(c) ? expert_mlp_forward(c, saved, out_RM) : dense_forward(c, saved, out_RM);
  };
  c.layer_input_TP.defined() ? layer_input_forward(c, saved, stream_out_RM, mlp) : mlp(stream_out_RM);
}

void add_mlp_backward(const LayerContext& c, LayerSaved& saved, const at::Tensor& grad_stream_RM,
                      const LayerViews& grads) {
  if (c.own.mlp == MlpKind::none) return;  // the gradient of what follows is that of the mixer's result
  if (c.layer_input_TP.defined()) add_layer_input_backward(c, saved, grad_stream_RM, grads);
  has_experts(c) ? add_expert_mlp_backward(c, saved, grad_stream_RM, grads)
                 : add_dense_backward(c, saved, grad_stream_RM, grads);
}

}  // namespace espalier
