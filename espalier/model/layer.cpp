#include "espalier/model/layer.h"

#include <ATen/ATen.h>

#include "espalier/device/held_buffers.h"
#include "espalier/device/scalar_type.h"
#include "espalier/model/branch.h"
#include "espalier/model/delta_layer.h"
#include "espalier/model/mlp.h"

namespace espalier {
namespace {

struct Sizes {
  std::int64_t rows, continuing, kv_width;  // T, R, J*D
};

Sizes sizes_of(const LayerContext& c) {
  return {c.input.rows(), c.narrow ? c.input.outputs() : c.input.rows(), c.shape.kv_heads * c.shape.head_dim};
}

Rotation rotation(const LayerContext& c, const at::Tensor& position_R, const at::Tensor& norm_weight) {
  return {c.rotary,    position_R, norm_weight, c.shape.rms_norm_eps, c.shape.head_dim, c.shape.attention.interleaved,
          c.shape.norm};
}
Rotation rotation_of_queries(const LayerContext& c) {
  return rotation(c, c.narrow ? c.input.output_position_O : c.input.position_T, c.weights.q_norm_D);
}
Rotation rotation_of_keys(const LayerContext& c) { return rotation(c, c.input.position_T, c.weights.k_norm_D); }

// The half of a block that ends with o_proj.
Branch branch_of(const LayerContext& c, const LayerSaved& saved) {
  return {c.weights.attention_post_norm_M, saved.branch_RM, saved.branch_rstd_R, c.weights.output};
}

// Heads of queries, where each stands before its gate.
at::Tensor without_gates(const LayerContext& c, const at::Tensor& query_gate_RW) {
  const std::int64_t D = c.shape.head_dim;
  return query_gate_RW.view({-1, 2 * D}).narrow(1, 0, D);
}

// The projected queries; with an output gate they are copied to query_RW.
at::Tensor queries_of(const LayerContext& c, const LayerSaved& saved, const at::Tensor& query_RW) {
  if (!c.shape.attention.output_gate) return saved.q_RW;
  c.ops.convert(without_gates(c, saved.q_RW), query_RW.view({-1, c.shape.head_dim}));
  return query_RW;
}

// What the output's projection reads; with an output gate it is written to gated_RW.
at::Tensor gated_values(const LayerContext& c, const LayerSaved& saved, const at::Tensor& gated_RW) {
  if (!c.shape.attention.output_gate) return saved.attended_RW;
  c.ops.gate_heads(saved.attended_RW, saved.q_RW, c.shape.head_dim, gated_RW);
  return gated_RW;
}

// Attention as its source runs it, from what was saved. Keys and values that the source keeps are written there in the
// first forward only; others' keys are written to rotated_k.
LayerAttention make_attention(const LayerContext& c, const LayerSaved& saved, bool write_kept,
                              const at::Tensor& rotated_q_RW, const at::Tensor& rotated_k_TW,
                              const at::Tensor& query_RW) {
  const std::int64_t kv_width = sizes_of(c).kv_width;
  const at::Tensor k_TW = saved.kv_TW.narrow(1, 0, kv_width), v_TW = saved.kv_TW.narrow(1, kv_width, kv_width);
  const bool keeps = c.kv.keeps();
  const KeysValues own = keeps ? c.kv.kept(c.layer) : KeysValues{rotated_k_TW, v_TW};
  c.ops.rotate(rotation_of_queries(c), queries_of(c, saved, query_RW), rotated_q_RW);
  if (!keeps || write_kept) c.ops.rotate(rotation_of_keys(c), k_TW, own.k);
  if (keeps && write_kept) c.ops.convert(v_TW, own.v);
  return {c.ops,
          c.timer,
          c.layer,
          c.shape.head_dim,
          c.narrow ? c.input.output_row_O : at::Tensor(),
          rotated_q_RW,
          own,
          c.shape.window_of(c.layer),
          c.shape.attention.scale,
          c.shape.attention.soft_cap};
}

// dL/dq, dL/dk, dL/dv of the projections' outputs from dL/d(attended).
struct ProjectionGradients {
  at::Tensor q_RW, kv_TW;
};

ProjectionGradients add_attention_backward(const LayerContext& c, const LayerSaved& saved,
                                           const LayerBackwardBuffers& declared, const HeldBuffers& held,
                                           const LayerViews& grads) {
  const Sizes s = sizes_of(c);
  const ProjectionGradients out{held[declared.grad_q_RW], held[declared.grad_kv_TW]};
  const LayerAttention attention = make_attention(c, saved, false, held[declared.rotated_q_RW],
                                                  held[declared.rotated_k_TW], held[declared.query_RW]);
  const bool gated = c.shape.attention.output_gate;
  if (gated)
    c.ops.gate_heads_backward(saved.attended_RW, saved.q_RW, c.shape.head_dim, held[declared.grad_attended_RW],
                              held[declared.grad_attended_RW], out.q_RW);
  if (grads.sinks_H.defined() && sizes_of(c).continuing > 0)
    c.ops.add_sinks_backward(c.weights.sinks_H, saved.attended_RW, saved.lse_HR, held[declared.grad_attended_RW],
                             grads.sinks_H);
  const at::Tensor& grad_q_RW = held[declared.grad_rotated_q_RW];
  KeysValues own = c.kv.gathered(c.layer);
  if (!c.kv.keeps()) {
    own = {held[declared.grad_k_TW], held[declared.grad_v_TW]};
    c.ops.zero(own.k);
    c.ops.zero(own.v);
  }
  c.kv.add_backward(attention, saved.attended_RW, saved.lse_HR, held[declared.grad_attended_RW], grad_q_RW, own);
  const auto grad_k_TW = own.k.view({s.rows, s.kv_width}), grad_v_TW = own.v.view({s.rows, s.kv_width});
  c.ops.add_rotate_backward(rotation_of_queries(c), gated ? held[declared.query_RW] : saved.q_RW, grad_q_RW,
                            gated ? held[declared.grad_query_RW] : out.q_RW, grads.q_norm_D);
  if (gated) c.ops.convert(held[declared.grad_query_RW].view({-1, c.shape.head_dim}), without_gates(c, out.q_RW));
  c.ops.add_rotate_backward(rotation_of_keys(c), saved.kv_TW.narrow(1, 0, s.kv_width), grad_k_TW,
                            out.kv_TW.narrow(1, 0, s.kv_width), grads.k_norm_D);
  c.ops.convert(grad_v_TW, out.kv_TW.narrow(1, s.kv_width, s.kv_width));
  return out;
}

}  // namespace

void take_attention_saved(const LayerContext& c, LayerSaved& saved) {
  const AttentionSavedBuffers declared(c.block(), c.block_rows());
  const auto take = [&](BufferList::Place place) { return c.arena.take(declared, place, c.dtype()); };
  saved.norm_rstd_T = take(declared.norm_rstd_T);
  saved.kv_TW = take(declared.kv_TW);
  saved.q_RW = take(declared.q_RW);
  saved.attended_RW = take(declared.attended_RW);
  saved.projected_TW = take(declared.projected_TW);
  saved.mixed_TV = take(declared.mixed_TV);
  saved.lse_HR = take(declared.lse_HR);
  saved.stream_mid_RM = take(declared.stream_mid_RM);
  saved.branch_RM = take(declared.branch_RM);
  saved.branch_rstd_R = take(declared.branch_rstd_R);
}

void take_mlp_saved(const LayerContext& c, LayerSaved& saved) {
  const MlpSavedBuffers declared(c.block(), c.block_rows());
  const auto take = [&](BufferList::Place place) { return c.arena.take(declared, place, c.dtype()); };
  saved.mlp_rstd_R = take(declared.mlp_rstd_R);
  saved.gate_up_RW = take(declared.gate_up_RW);
  saved.mlp_branch_RM = take(declared.branch_RM);
  saved.mlp_branch_rstd_R = take(declared.branch_rstd_R);
  saved.router_logits_RE = take(declared.router_logits_RE);
  saved.router_choice_RK = take(declared.router_choice_RK);
  saved.router_weight_RK = take(declared.router_weight_RK);
}

void layer_forward(const LayerContext& c, LayerSaved& saved, const at::Tensor& stream_out_RM) {
  using Stage = LayerForwardBuffers::Stage;
  const std::int64_t continuing = sizes_of(c).continuing;
  if (c.shape.mixer_of(c.layer) == Mixer::delta_rule) {
    delta_forward(c, saved);
    if (continuing > 0) mlp_forward(c, saved, stream_out_RM);
    return;
  }
  const LayerForwardBuffers declared(c.block(), c.block_rows(), stream_out_RM.defined());
  HeldBuffers held(c.arena, declared, c.dtype());
  held.enter(Stage::projection);
  at::Tensor normed_TM = saved.stream_in_TM;
  if (c.has_norms_before()) {
    normed_TM = held[declared.normed_TM];
    c.ops.norm(saved.stream_in_TM, c.attention_norm(c.weights), c.shape.rms_norm_eps, normed_TM, saved.norm_rstd_T);
  }
  c.products.linear(saved.kv_TW, normed_TM, c.weights.key_value);
  if (continuing > 0)
    c.products.linear(saved.q_RW, c.continuing_rows(normed_TM, held[declared.query_input_RM]), c.weights.query);
  held.enter(Stage::attention);
  c.kv.attend(
      make_attention(c, saved, true, held[declared.rotated_q_RW], held[declared.rotated_k_TW], held[declared.query_RW]),
      saved.attended_RW, saved.lse_HR);
  if (continuing == 0) return;
  if (c.weights.sinks_H.defined()) c.ops.join_sinks(c.weights.sinks_H, saved.attended_RW, saved.lse_HR);
  held.enter(Stage::residual);
  add_branch(c, branch_of(c, saved), c.continuing_rows(saved.stream_in_TM, held[declared.residual_RM]),
             gated_values(c, saved, held[declared.gated_RW]), held[declared.branch_RM], saved.stream_mid_RM);
  held.enter(Stage::mlp);
  mlp_forward(c, saved, stream_out_RM);
}

void layer_forward_again(const LayerContext& c, LayerSaved& saved, ItemState state) {
  if (state.recomputes_attention()) take_attention_saved(c, saved);
  if (state.recomputes_mlp()) take_mlp_saved(c, saved);
  if (state.recomputes_attention())
    layer_forward(c, saved, at::Tensor());
  else if (state.recomputes_mlp() && sizes_of(c).continuing > 0)
    mlp_forward(c, saved, at::Tensor());
}

void add_layer_backward(const LayerContext& c, LayerSaved& saved, const at::Tensor& grad_stream_RM,
                        const at::Tensor& grad_in_TM, const LayerViews& grads) {
  if (c.shape.mixer_of(c.layer) == Mixer::delta_rule)
    return add_delta_backward(c, saved, grad_stream_RM, grad_in_TM, grads);
  using Stage = LayerBackwardBuffers::Stage;
  const bool continues = sizes_of(c).continuing > 0;
  const LayerBackwardBuffers declared(c.block(), c.block_rows());
  HeldBuffers held(c.arena, declared, c.dtype());
  if (c.narrow) c.ops.zero(grad_in_TM);
  held.enter(Stage::mlp);
  if (continues) {
    add_mlp_backward(c, saved, grad_stream_RM, grads);
    held.enter(Stage::output);
    const at::Tensor grad_branch_RM = add_branch_backward(c, branch_of(c, saved), grad_stream_RM,
                                                          held[declared.grad_branch_RM], grads.attention_post_norm_M);
    c.products.add_linear_grad_weight(grads.output, c.weights.output, grad_branch_RM,
                                      gated_values(c, saved, held[declared.gated_RW]), held[declared.output_product]);
    c.products.linear_grad_input(held[declared.grad_attended_RW], grad_branch_RM, c.weights.output);
    if (c.narrow) c.ops.add_scatter(grad_stream_RM, c.input.output_row_O, grad_in_TM);
  }
  held.enter(Stage::attention);
  const ProjectionGradients grad = add_attention_backward(c, saved, declared, held, grads);
  held.enter(Stage::key_value);
  const at::Tensor &grad_normed_TM = held[declared.normed_TM],  // until then the rows themselves
      &normed_TM = c.has_norms_before() ? grad_normed_TM : saved.stream_in_TM;
  if (c.has_norms_before() && (grads.key_value.trains() || grads.query.trains()))
    c.ops.norm_again(saved.stream_in_TM, c.attention_norm(c.weights), saved.norm_rstd_T, normed_TM);
  c.products.add_linear_grad_weight(grads.key_value, c.weights.key_value, grad.kv_TW, normed_TM,
                                    held[declared.kv_product]);
  held.enter(Stage::query);
  if (continues && grads.query.trains())
    c.products.add_linear_grad_weight(grads.query, c.weights.query, grad.q_RW,
                                      c.continuing_rows(normed_TM, held[declared.query_input_RM]),
                                      held[declared.query_product]);
  held.enter(Stage::input);
  c.products.linear_grad_input(grad_normed_TM, grad.kv_TW, c.weights.key_value);
  if (c.narrow && continues) {
    const at::Tensor& part_RM = held[declared.query_part_RM];
    c.products.linear_grad_input(part_RM, grad.q_RW, c.weights.query);
    c.ops.add_scatter(part_RM, c.input.output_row_O, grad_normed_TM);
  } else if (!c.narrow) {
    c.products.add_linear_grad_input(grad_normed_TM, grad.q_RW, c.weights.query);
  }
  c.mesh.tp.add_over_ranks(grad_normed_TM);
  if (c.has_norms_before())
    c.ops.add_norm_backward(saved.stream_in_TM, c.attention_norm(c.weights), saved.norm_rstd_T, grad_normed_TM,
                            grad_in_TM, c.attention_norm(grads));
  else
    c.ops.add_scaled(grad_in_TM, grad_normed_TM, 1, grad_in_TM);
}

}  // namespace espalier
