#include "espalier/model/expert_mlp.h"

#include <ATen/core/Tensor.h>

#include "espalier/device/held_buffers.h"
#include "espalier/device/scalar_type.h"
#include "espalier/model/apart_experts.h"
#include "espalier/model/expert_products.h"
#include "espalier/model/expert_router.h"
#include "espalier/model/mlp_buffers.h"
#include "espalier/model/shared_expert.h"

namespace espalier {

void expert_mlp_forward(const LayerContext& c, LayerSaved& saved, const at::Tensor& stream_out_RM) {
  if (c.shape.shared_expert.apart) return apart_experts_forward(c, saved, stream_out_RM);
  const ExpertForwardBuffers declared(c.block(), saved.stream_mid_RM.size(0), stream_out_RM.defined());
  using Stage = ExpertForwardBuffers::Stage;
  HeldBuffers held(c.arena, declared, c.dtype());
  held.enter(Stage::router);
  const at::Tensor& normed_RM = held[declared.normed_RM];
  c.ops.norm(saved.stream_mid_RM, c.mlp_norm(c.weights), c.shape.rms_norm_eps, normed_RM, saved.mlp_rstd_R);
  router_logits(c, saved, normed_RM, {held[declared.wide_normed_RM], held[declared.wide_router_EM]});
  held.enter(Stage::experts);
  const at::Tensor& sum_RM = held[declared.sum_RM];
  choose_experts(c, saved);
  if (sum_RM.defined()) c.ops.zero(sum_RM);
  expert_products(c.mesh).add_forward(
      c, saved, normed_RM, sum_RM,
      {held[declared.expert_rows_RM], held[declared.act_RF], {}, {}, held[declared.low_rank_Rr]});
  if (c.shape.shared_expert.inner > 0) {
    held.enter(Stage::shared);
    add_shared_forward(
        c, saved, normed_RM, sum_RM,
        {held[declared.expert_rows_RM], held[declared.shared_act_RF], {}, {}, held[declared.low_rank_Rr]});
  }
  if (!sum_RM.defined()) return;
  c.mesh.tp.add_over_ranks(sum_RM);
  c.ops.round_sum(saved.stream_mid_RM, sum_RM, stream_out_RM);
}

void add_expert_mlp_backward(const LayerContext& c, LayerSaved& saved, const at::Tensor& grad_stream_RM,
                             const LayerViews& grads) {
  if (c.shape.shared_expert.apart) return add_apart_experts_backward(c, saved, grad_stream_RM, grads);
  using Stage = ExpertBackwardBuffers::Stage;
  const ExpertBackwardBuffers declared(c.block(), grad_stream_RM.size(0));
  HeldBuffers held(c.arena, declared, c.dtype());
  held.enter(Stage::experts);
  const at::Tensor normed_RM = held[declared.normed_RM];
  c.ops.norm_again(saved.stream_mid_RM, c.mlp_norm(c.weights), saved.mlp_rstd_R, normed_RM);
  const at::Tensor& grad_weight_RK = held[declared.grad_weight_RK];
  const at::Tensor& grad_normed_sum_RM = held[declared.grad_normed_sum_RM];
  c.ops.zero(grad_normed_sum_RM);
  c.ops.zero(grad_weight_RK);
  expert_products(c.mesh).add_backward(
      c, saved, normed_RM, grad_stream_RM, grads, {grad_normed_sum_RM, grad_weight_RK},
      {held[declared.expert_rows_RM], held[declared.act_RF], held[declared.grad_gate_up_RW],
       held[declared.expert_product], held[declared.low_rank_Rr]});
  const SharedExpert& shared = c.shape.shared_expert;
  const at::Tensor& grad_shared_weight_R1 = held[declared.grad_shared_weight_R1];
  if (shared.inner > 0) {
    held.enter(Stage::shared);
    add_shared_backward(
        c, saved, normed_RM, grad_stream_RM, grads, {grad_normed_sum_RM, grad_shared_weight_R1},
        {held[declared.expert_rows_RM], held[declared.shared_act_RF], held[declared.grad_shared_gate_up_RW],
         held[declared.shared_product], held[declared.low_rank_Rr]});
  }
  c.mesh.tp.add_over_ranks(grad_normed_sum_RM);
  c.mesh.tp.add_over_ranks(grad_weight_RK);
  if (shared.gate) c.mesh.tp.add_over_ranks(grad_shared_weight_R1);
  held.enter(Stage::router);
  const at::Tensor& grad_logits_RE = held[declared.grad_logits_RE];
  router_backward(c, saved, grad_weight_RK, grads, grad_logits_RE);
  const WideRouter wide{held[declared.wide_normed_RM], held[declared.wide_router_EM]};
  if (wide.used())
    add_wide_router_backward(c, grad_logits_RE, normed_RM, wide, grads.router, grad_normed_sum_RM);
  else
    c.products.add_linear_grad_weight(grads.router, c.weights.router, grad_logits_RE, normed_RM,
                                      held[declared.router_product]);
  const at::Tensor& grad_shared_logit_R1 = held[declared.grad_shared_logit_R1];
  if (shared.gate)
    add_shared_gate_backward(c, saved, grad_shared_weight_R1, normed_RM, grads, grad_shared_logit_R1,
                             held[declared.shared_gate_product]);
  const at::Tensor& grad_normed_RM = normed_RM;  // its values are no longer needed
  c.ops.round_sum(at::Tensor(), grad_normed_sum_RM, grad_normed_RM);
  if (!wide.used()) c.products.add_linear_grad_input(grad_normed_RM, grad_logits_RE, c.weights.router);
  if (shared.gate) c.products.add_linear_grad_input(grad_normed_RM, grad_shared_logit_R1, c.weights.shared_expert_gate);
  c.ops.add_norm_backward(saved.stream_mid_RM, c.mlp_norm(c.weights), saved.mlp_rstd_R, grad_normed_RM, grad_stream_RM,
                          c.mlp_norm(grads));
}

namespace {

// No rows, in the form that products of experts take them.
struct NoRows {
  explicit NoRows(const LayerContext& c)
      : normed_0M(c.arena.take({0, c.shape.hidden}, c.dtype())),
        sum_0M(c.arena.take({0, c.shape.hidden}, accumulator_type(c.dtype()))),
        weight_0K(c.arena.take({0, c.shape.experts_per_token}, accumulator_type(c.dtype()))) {
    saved.router_choice_RK = c.arena.take({0, c.shape.experts_per_token}, at::kInt);
    saved.router_weight_RK = weight_0K;
  }

  at::Tensor normed_0M, sum_0M, weight_0K;
  LayerSaved saved;
};

}  // namespace

void join_experts_forward(const LayerContext& c) {
  const ArenaScope scope(c.arena);
  const NoRows none(c);
  expert_products(c.mesh).add_forward(c, none.saved, none.normed_0M, none.sum_0M, {});
}

void join_experts_backward(const LayerContext& c, const LayerViews& grads) {
  if (c.shape.shared_expert.apart) join_experts_forward(c);
  const ArenaScope scope(c.arena);
  const NoRows none(c);
  expert_products(c.mesh).add_backward(c, none.saved, none.normed_0M, none.normed_0M, grads,
                                       {none.sum_0M, none.weight_0K}, {});
}

}  // namespace espalier
