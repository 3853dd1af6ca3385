// The dense MLP: z = y + (silu(g) u) Wd^T with [g u] = norm(y) Wgu^T; and the choice between it and experts.
// R rows, M width, F inner width.
#include "espalier/model/mlp.h"

#include <ATen/ATen.h>

#include "espalier/device/held_buffers.h"
#include "espalier/model/expert_mlp.h"

namespace espalier {
namespace {

bool has_experts(const LayerContext& c) { return c.weights.router.weight.defined(); }

void dense_forward(const LayerContext& c, LayerSaved& saved, const at::Tensor& stream_out_RM) {
  using Stage = DenseForwardBuffers::Stage;
  const DenseForwardBuffers declared(c.block(), saved.stream_mid_RM.size(0), stream_out_RM.defined());
  HeldBuffers held(c.arena, declared, c.dtype());
  held.enter(Stage::up);
  const at::Tensor& normed_RM = held[declared.normed_RM];
  c.ops.norm(saved.stream_mid_RM, c.weights.mlp_norm_M, c.shape.rms_norm_eps, normed_RM, saved.mlp_rstd_R);
  c.products.linear(saved.gate_up_RW, normed_RM, c.weights.gate_up);
  if (!stream_out_RM.defined()) return;
  held.enter(Stage::down);
  const at::Tensor& act_RF = held[declared.act_RF];
  c.ops.swiglu(saved.gate_up_RW, act_RF);
  c.products.linear_onto(stream_out_RM, saved.stream_mid_RM, act_RF, c.weights.down);
}

void add_dense_backward(const LayerContext& c, LayerSaved& saved, const at::Tensor& grad_stream_RM,
                        const LayerViews& grads) {
  using Stage = DenseBackwardBuffers::Stage;
  const DenseBackwardBuffers declared(c.block(), saved.stream_mid_RM.size(0));
  HeldBuffers held(c.arena, declared, c.dtype());
  held.enter(Stage::down);
  const at::Tensor act_RF = held[declared.act_RF];  // first holds its own gradient
  c.products.linear_grad_input(act_RF, grad_stream_RM, c.weights.down);
  c.ops.swiglu_backward(saved.gate_up_RW, act_RF, saved.gate_up_RW, act_RF);
  c.products.add_linear_grad_weight(grads.down, grad_stream_RM, act_RF, held[declared.down_product]);
  held.enter(Stage::up);
  const at::Tensor& normed_RM = held[declared.normed_RM];
  if (grads.gate_up.trains()) c.ops.norm_again(saved.stream_mid_RM, c.weights.mlp_norm_M, saved.mlp_rstd_R, normed_RM);
  c.products.add_linear_grad_weight(grads.gate_up, saved.gate_up_RW, normed_RM, held[declared.gate_up_product]);
  c.products.linear_grad_input(normed_RM, saved.gate_up_RW, c.weights.gate_up);
  c.mesh.tp.add_over_ranks(normed_RM);
  c.ops.add_norm_backward(saved.stream_mid_RM, c.weights.mlp_norm_M, saved.mlp_rstd_R, normed_RM, grad_stream_RM,
                          grads.mlp_norm_M);
}

}  // namespace

void mlp_forward(const LayerContext& c, LayerSaved& saved, const at::Tensor& stream_out_RM) {
  has_experts(c) ? expert_mlp_forward(c, saved, stream_out_RM) : dense_forward(c, saved, stream_out_RM);
}

void add_mlp_backward(const LayerContext& c, LayerSaved& saved, const at::Tensor& grad_stream_RM,
                      const LayerViews& grads) {
  has_experts(c) ? add_expert_mlp_backward(c, saved, grad_stream_RM, grads)
                 : add_dense_backward(c, saved, grad_stream_RM, grads);
}

}  // namespace espalier
