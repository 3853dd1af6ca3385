#include "espalier/model/apart_experts.h"

#include <ATen/core/Tensor.h>

#include <cmath>

#include "espalier/device/held_buffers.h"
#include "espalier/model/expert_products.h"
#include "espalier/model/expert_router.h"
#include "espalier/model/mlp_buffers.h"
#include "espalier/model/shared_expert.h"

namespace espalier {
namespace {

bool exchanges(const LayerContext& c) { return c.mesh.ep.size() > 1; }

NormWeights norm_of(const LayerContext& c, const at::Tensor& weight_M) { return {weight_M, c.shape.norm}; }

// The factor of the router's rows behind their norm.
double router_factor(const LayerContext& c) { return 1 / std::sqrt(static_cast<double>(c.shape.hidden)); }

// The rows behind one of the three norms, whose 1/rms is the same.
void rows_of(const LayerContext& c, const LayerSaved& saved, const at::Tensor& weight_M, const at::Tensor& out_RM) {
  c.ops.norm(saved.stream_mid_RM, norm_of(c, weight_M), c.shape.rms_norm_eps, out_RM, saved.mlp_rstd_R);
}
void rows_again(const LayerContext& c, const LayerSaved& saved, const at::Tensor& weight_M, const at::Tensor& out_RM) {
  c.ops.norm_again(saved.stream_mid_RM, norm_of(c, weight_M), saved.mlp_rstd_R, out_RM);
}

// A result from its sum, which begins anew.
void take_result(const LayerContext& c, const at::Tensor& sum_RM, const at::Tensor& result_RM) {
  c.mesh.tp.add_over_ranks(sum_RM);
  c.ops.round_sum(at::Tensor(), sum_RM, result_RM);
  c.ops.zero(sum_RM);
}

// Overwrites saved.mlp_branch with the sum of both results behind their norms. Rooms hold one each.
void join(const LayerContext& c, const LayerSaved& saved, const at::Tensor& first_RM, const at::Tensor& second_RM) {
  const ApartNorms& norms = c.weights.apart;
  const double eps = c.shape.rms_norm_eps;
  c.ops.norm(saved.shared_branch_RM, norm_of(c, norms.behind_shared_M), eps, first_RM, saved.shared_branch_rstd_R);
  c.ops.norm(saved.expert_branch_RM, norm_of(c, norms.behind_experts_M), eps, second_RM, saved.expert_branch_rstd_R);
  c.ops.add_scaled(first_RM, second_RM, 1, saved.mlp_branch_RM);
}

// The norm behind both, which also fills its 1/rms.
void norm_of_both(const LayerContext& c, const LayerSaved& saved, const at::Tensor& out_RM) {
  c.ops.norm(saved.mlp_branch_RM, norm_of(c, c.weights.mlp_post_norm_M), c.shape.rms_norm_eps, out_RM,
             saved.mlp_branch_rstd_R);
}

// dL/dx of a norm behind a result, from dL/dy. Overwrites out.
void norm_backward(const LayerContext& c, const at::Tensor& x_RM, const at::Tensor& weight_M, const at::Tensor& rstd_R,
                   const at::Tensor& grad_RM, const at::Tensor& out_RM, const at::Tensor& grad_weight_M) {
  c.ops.zero(out_RM);
  c.ops.add_norm_backward(x_RM, norm_of(c, weight_M), rstd_R, grad_RM, out_RM, norm_of(c, grad_weight_M));
}

// From dL/drows of one of the three norms: adds dL/dy.
void add_rows_backward(const LayerContext& c, const LayerSaved& saved, const at::Tensor& weight_M,
                       const at::Tensor& grad_rows_RM, const at::Tensor& grad_stream_RM,
                       const at::Tensor& grad_weight_M) {
  c.ops.add_norm_backward(saved.stream_mid_RM, norm_of(c, weight_M), saved.mlp_rstd_R, grad_rows_RM, grad_stream_RM,
                          norm_of(c, grad_weight_M));
}

// With several ranks of ep: the experts' results, and what follows from them, which no recomputation has.
void results_again(const LayerContext& c, const LayerSaved& saved, const at::Tensor& rows_RM, const at::Tensor& sum_RM,
                   const at::Tensor& room_RM) {
  rows_again(c, saved, c.weights.apart.experts_M, rows_RM);
  c.ops.zero(sum_RM);
  expert_products(c.mesh).add_forward(c, saved, rows_RM, sum_RM, {});
  take_result(c, sum_RM, saved.expert_branch_RM);
  join(c, saved, rows_RM, room_RM);
  norm_of_both(c, saved, rows_RM);
}

}  // namespace

void apart_experts_forward(const LayerContext& c, LayerSaved& saved, const at::Tensor& stream_out_RM) {
  using Stage = ExpertForwardBuffers::Stage;
  const ExpertForwardBuffers declared(c.block(), saved.stream_mid_RM.size(0), stream_out_RM.defined());
  HeldBuffers held(c.arena, declared, c.dtype());
  held.enter(Stage::router);
  const at::Tensor& rows_RM = held[declared.normed_RM];
  rows_of(c, saved, c.weights.apart.router_M, rows_RM);
  c.ops.scale(rows_RM, router_factor(c));
  router_logits(c, saved, rows_RM, {});
  held.enter(Stage::experts);
  const at::Tensor& sum_RM = held[declared.sum_RM];
  c.ops.zero(sum_RM);
  choose_experts(c, saved);
  const bool all_results = stream_out_RM.defined() || !exchanges(c);
  if (all_results) {
    rows_of(c, saved, c.weights.apart.experts_M, rows_RM);
    expert_products(c.mesh).add_forward(
        c, saved, rows_RM, sum_RM,
        {held[declared.expert_rows_RM], held[declared.act_RF], {}, {}, held[declared.low_rank_Rr]});
    take_result(c, sum_RM, saved.expert_branch_RM);
  }
  held.enter(Stage::shared);
  rows_of(c, saved, c.weights.mlp_norm_M, rows_RM);
  add_shared_forward(c, saved, rows_RM, sum_RM,
                     {held[declared.expert_rows_RM], held[declared.shared_act_RF], {}, {}, held[declared.low_rank_Rr]});
  take_result(c, sum_RM, saved.shared_branch_RM);
  if (!all_results) return;
  join(c, saved, rows_RM, held[declared.branch_RM]);
  norm_of_both(c, saved, rows_RM);
  if (stream_out_RM.defined()) c.ops.add_scaled(saved.stream_mid_RM, rows_RM, 1, stream_out_RM);
}

void add_apart_experts_backward(const LayerContext& c, LayerSaved& saved, const at::Tensor& grad_stream_RM,
                                const LayerViews& grads) {
  using Stage = ExpertBackwardBuffers::Stage;
  const ApartNorms& norms = c.weights.apart;
  const ExpertBackwardBuffers declared(c.block(), grad_stream_RM.size(0));
  HeldBuffers held(c.arena, declared, c.dtype());
  held.enter(Stage::experts);
  const at::Tensor &rows_RM = held[declared.normed_RM], &grad_branch_RM = held[declared.grad_branch_RM],
                   &grad_result_RM = held[declared.grad_result_RM];
  const at::Tensor &grad_weight_RK = held[declared.grad_weight_RK], &grad_sum_RM = held[declared.grad_normed_sum_RM];
  if (exchanges(c)) results_again(c, saved, rows_RM, grad_sum_RM, grad_result_RM);
  norm_backward(c, saved.mlp_branch_RM, c.weights.mlp_post_norm_M, saved.mlp_branch_rstd_R, grad_stream_RM,
                grad_branch_RM, grads.mlp_post_norm_M);

  norm_backward(c, saved.expert_branch_RM, norms.behind_experts_M, saved.expert_branch_rstd_R, grad_branch_RM,
                grad_result_RM, grads.apart.behind_experts_M);
  rows_again(c, saved, norms.experts_M, rows_RM);
  c.ops.zero(grad_sum_RM);
  c.ops.zero(grad_weight_RK);
  expert_products(c.mesh).add_backward(
      c, saved, rows_RM, grad_result_RM, grads, {grad_sum_RM, grad_weight_RK},
      {held[declared.expert_rows_RM], held[declared.act_RF], held[declared.grad_gate_up_RW],
       held[declared.expert_product], held[declared.low_rank_Rr]});
  take_result(c, grad_sum_RM, rows_RM);
  c.mesh.tp.add_over_ranks(grad_weight_RK);
  add_rows_backward(c, saved, norms.experts_M, rows_RM, grad_stream_RM, grads.apart.experts_M);

  held.enter(Stage::shared);
  norm_backward(c, saved.shared_branch_RM, norms.behind_shared_M, saved.shared_branch_rstd_R, grad_branch_RM,
                grad_result_RM, grads.apart.behind_shared_M);
  rows_again(c, saved, c.weights.mlp_norm_M, rows_RM);
  add_shared_backward(
      c, saved, rows_RM, grad_result_RM, grads, {grad_sum_RM, at::Tensor()},
      {held[declared.expert_rows_RM], held[declared.shared_act_RF], held[declared.grad_shared_gate_up_RW],
       held[declared.shared_product], held[declared.low_rank_Rr]});
  take_result(c, grad_sum_RM, rows_RM);
  add_rows_backward(c, saved, c.weights.mlp_norm_M, rows_RM, grad_stream_RM, grads.mlp_norm_M);

  held.enter(Stage::router);
  const at::Tensor& grad_logits_RE = held[declared.grad_logits_RE];
  router_backward(c, saved, grad_weight_RK, grads, grad_logits_RE);
  if (grads.router.trains()) {
    rows_again(c, saved, norms.router_M, rows_RM);
    c.ops.scale(rows_RM, router_factor(c));
    c.products.add_linear_grad_weight(grads.router, c.weights.router, grad_logits_RE, rows_RM,
                                      held[declared.router_product]);
  }
  c.products.linear_grad_input(rows_RM, grad_logits_RE, c.weights.router);
  c.ops.scale(rows_RM, router_factor(c));
  add_rows_backward(c, saved, norms.router_M, rows_RM, grad_stream_RM, grads.apart.router_M);
}

}  // namespace espalier
