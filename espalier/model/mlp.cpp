// The dense MLP: z = y + (silu(g) u) Wd^T with [g u] = norm(y) Wgu^T; and the choice between it and experts.
// R rows, M width, F inner width.
#include "espalier/model/mlp.h"

#include <ATen/ATen.h>

#include "espalier/device/scalar_type.h"
#include "espalier/model/expert_mlp.h"

namespace espalier {
namespace {

bool has_experts(const LayerContext& c) { return c.weights.router_weight.defined(); }

at::Tensor take_like(const LayerContext& c, const LayerSaved& saved, std::int64_t width) {
  return c.arena.take({saved.stream_mid_RM.size(0), width}, saved.stream_mid_RM.scalar_type());
}

void dense_forward(const LayerContext& c, LayerSaved& saved, const at::Tensor& stream_out_RM) {
  {
    const ArenaScope scope(c.arena);
    const at::Tensor normed_RM = take_like(c, saved, c.shape.hidden);
    c.ops.norm(saved.stream_mid_RM, c.weights.mlp_norm_M, c.shape.rms_norm_eps, normed_RM, saved.mlp_rstd_R);
    c.products.linear(saved.gate_up_RW, normed_RM, c.weights.gate_up_weight, c.weights.gate_up_bias);
  }
  if (!stream_out_RM.defined()) return;
  const ArenaScope scope(c.arena);
  const at::Tensor act_RF = take_like(c, saved, c.shape.inner);
  c.ops.swiglu(saved.gate_up_RW, act_RF);
  c.products.linear_onto(stream_out_RM, saved.stream_mid_RM, act_RF, c.weights.down_weight, c.weights.down_bias);
}

void add_dense_backward(const LayerContext& c, LayerSaved& saved, const at::Tensor& grad_stream_RM,
                        const LayerViews& grads) {
  const ArenaScope scope(c.arena);
  const at::Tensor act_RF = take_like(c, saved, c.shape.inner);  // first holds its own gradient
  c.products.linear_grad_input(act_RF, grad_stream_RM, c.weights.down_weight);
  c.ops.swiglu_backward(saved.gate_up_RW, act_RF, saved.gate_up_RW, act_RF);
  c.products.add_linear_grad_weight(grads.down_weight, grads.down_bias, grad_stream_RM, act_RF);
  const at::Tensor normed_RM = take_like(c, saved, c.shape.hidden);
  c.ops.norm_again(saved.stream_mid_RM, c.weights.mlp_norm_M, saved.mlp_rstd_R, normed_RM);
  c.products.add_linear_grad_weight(grads.gate_up_weight, grads.gate_up_bias, saved.gate_up_RW, normed_RM);
  c.products.linear_grad_input(normed_RM, saved.gate_up_RW, c.weights.gate_up_weight);
  c.ops.add_norm_backward(saved.stream_mid_RM, c.weights.mlp_norm_M, saved.mlp_rstd_R, normed_RM, grad_stream_RM,
                          grads.mlp_norm_M);
}

}  // namespace

void take_mlp_saved(const LayerContext& c, LayerSaved& saved, std::int64_t rows) {
  const at::ScalarType dtype = saved.stream_mid_RM.scalar_type();
  saved.mlp_rstd_R = c.arena.take({rows}, accumulator_type(dtype));
  if (has_experts(c))
    take_expert_mlp_saved(c, saved, rows);
  else
    saved.gate_up_RW = c.arena.take({rows, 2 * c.shape.inner}, dtype);
}

void mlp_forward(const LayerContext& c, LayerSaved& saved, const at::Tensor& stream_out_RM) {
  has_experts(c) ? expert_mlp_forward(c, saved, stream_out_RM) : dense_forward(c, saved, stream_out_RM);
}

void add_mlp_backward(const LayerContext& c, LayerSaved& saved, const at::Tensor& grad_stream_RM,
                      const LayerViews& grads) {
  has_experts(c) ? add_expert_mlp_backward(c, saved, grad_stream_RM, grads)
                 : add_dense_backward(c, saved, grad_stream_RM, grads);
}

}  // namespace espalier
