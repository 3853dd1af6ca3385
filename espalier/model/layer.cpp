#include "espalier/model/layer.h"

#include <ATen/ATen.h>

#include <vector>

#include "espalier/device/held_buffers.h"
#include "espalier/device/scalar_type.h"
#include "espalier/model/branch.h"
#include "espalier/model/delta_layer.h"
#include "espalier/model/kv_path.h"
#include "espalier/model/latent.h"
#include "espalier/model/mlp.h"
#include "espalier/model/path_latents.h"

namespace espalier {
namespace {

struct Sizes {
  std::int64_t rows, continuing;  // T, R
};

Sizes sizes_of(const LayerContext& c) { return {c.input.rows(), c.narrow ? c.input.outputs() : c.input.rows()}; }

Rotation rotation(const LayerContext& c, const at::Tensor& position_R, const at::Tensor& norm_weight) {
  return {c.rotary,    position_R, norm_weight, c.shape.rms_norm_eps, c.shape.head_dim, c.shape.attention.interleaved,
          c.shape.norm};
}
Rotation rotation_of_queries(const LayerContext& c) {
  Rotation queries = rotation(c, c.narrow ? c.input.output_position_O : c.input.position_T, c.weights.q_norm_D);
  queries.tables = c.query_rotary;
  queries.first = c.shape.latent.plain;
  return queries;
}
Rotation rotation_of_keys(const LayerContext& c) { return rotation(c, c.input.position_T, c.weights.k_norm_D); }
// Of the row that all keys share, in latent attention.
Rotation rotation_of_shared_keys(const LayerContext& c) {
  Rotation shared = rotation(c, c.input.position_T, at::Tensor());
  shared.head_dim = c.shape.latent.rotary;
  return shared;
}

LatentSaved query_latent_of(const LayerSaved& saved) { return {saved.query_latent_RC, saved.query_latent_rstd_R}; }
LatentSaved key_value_latent_of(const LayerSaved& saved) { return {saved.latent_TC, saved.latent_rstd_T}; }

bool gives_latents(const LayerContext& c) { return gives_latents(c.block(), c.block_rows()); }

void project_keys_values(const LayerContext& c, const LayerSaved& saved, const at::Tensor& normed_TM,
                         const at::Tensor& normed_latent_TC) {
  if (!c.shape.has_latents()) return c.products.linear(saved.kv_TW, normed_TM, c.weights.key_value);
  latent_forward(c, key_value_latent(c.weights), key_value_latent_of(saved), normed_TM, normed_latent_TC, saved.kv_TW);
  c.products.linear(saved.rotary_key_TK, normed_TM, c.weights.rotary_key);
  c.ops.rotate(rotation_of_shared_keys(c), saved.rotary_key_TK, saved.rotary_key_TK);
}

void project_queries(const LayerContext& c, const LayerSaved& saved, const at::Tensor& normed_RM,
                     const at::Tensor& normed_latent_RC) {
  if (c.shape.latent.query == 0) return c.products.linear(saved.q_RW, normed_RM, c.weights.query);
  latent_forward(c, query_latent(c.weights), query_latent_of(saved), normed_RM, normed_latent_RC, saved.q_RW);
}

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
// first forward only; others' keys are written to rotated_k, and of latent attention values to value_TW.
LayerAttention make_attention(const LayerContext& c, const LayerSaved& saved, bool write_kept,
                              const at::Tensor& rotated_q_RW, const at::Tensor& rotated_k_TW,
                              const at::Tensor& value_TW, const at::Tensor& query_RW) {
  const bool keeps = c.kv.keeps(c.layer), latents = c.shape.has_latents();
  const std::int64_t K = c.shape.key_width(), V = c.shape.value_width();
  const at::Tensor v_TW = latents ? value_TW : saved.kv_TW.narrow(1, K, V);
  const KeysValues own = keeps ? c.kv.kept(c.layer) : KeysValues{rotated_k_TW, v_TW};
  c.ops.rotate(rotation_of_queries(c), queries_of(c, saved, query_RW), rotated_q_RW);
  if (latents && !gives_latents(c) && (!keeps || write_kept)) {
    c.ops.expand_heads(saved.kv_TW, saved.rotary_key_TK, own.k, own.v);
  } else if (!latents) {
    if (!keeps || write_kept) c.ops.rotate(rotation_of_keys(c), saved.kv_TW.narrow(1, 0, K), own.k);
    if (keeps && write_kept) c.ops.convert(v_TW, own.v);
  }
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

// As a source of rows that ranks of cp share takes them.
SourceLatents latents_of(const LayerContext& c, const LayerSaved& saved, const LayerViews* grads) {
  return {c, saved.latent_TC, saved.latent_rstd_T, saved.rotary_key_TK, grads};
}

// Whether the path keeps the rows' own latents, with the sums of their gradients.
bool keeps_latents(const LayerContext& c) { return carries_latents(c) && c.kv.keeps(c.layer); }

// dL/dq, dL/dk, dL/dv of the projections' outputs from dL/d(attended).
struct ProjectionGradients {
  at::Tensor q_RW, kv_TW;
  at::Tensor normed_latent_TC;  // instead of kv_TW where the rows give latents to other ranks
  at::Tensor rotary_key_TK;     // of latent attention
};

ProjectionGradients add_attention_backward(const LayerContext& c, const LayerSaved& saved,
                                           const LayerBackwardBuffers& declared, const HeldBuffers& held,
                                           const LayerViews& grads) {
  const Sizes s = sizes_of(c);
  const ProjectionGradients out{held[declared.grad_q_RW], held[declared.grad_kv_TW],
                                held[declared.grad_normed_latent_TC], held[declared.grad_rotary_key_TK]};
  const SourceLatents given = latents_of(c, saved, &grads);
  LayerAttention attention = make_attention(c, saved, false, held[declared.rotated_q_RW], held[declared.rotated_k_TW],
                                            held[declared.value_TW], held[declared.query_RW]);
  const bool gated = c.shape.attention.output_gate, gives = gives_latents(c);
  if (gives) attention.latents = &given;
  if (gated)
    c.ops.gate_heads_backward(saved.attended_RW, saved.q_RW, c.shape.head_dim, held[declared.grad_attended_RW],
                              held[declared.grad_attended_RW], out.q_RW);
  if (grads.sinks_H.defined() && sizes_of(c).continuing > 0)
    c.ops.add_sinks_backward(c.weights.sinks_H, saved.attended_RW, saved.lse_HR, held[declared.grad_attended_RW],
                             grads.sinks_H);
  const at::Tensor& grad_q_RW = held[declared.grad_rotated_q_RW];
  KeysValues own = c.kv.gathered(c.layer);
  if (gives) {
    own = {out.normed_latent_TC, held[declared.grad_rotary_key_sum_TK]};
  } else if (!c.kv.keeps(c.layer)) {
    own = {held[declared.grad_k_TW], held[declared.grad_v_TW]};
    c.ops.zero(own.k);
    c.ops.zero(own.v);
    c.kv.add_gathered(c.ops, c.layer, own);
  }
  c.kv.add_backward(attention, saved.attended_RW, saved.lse_HR, held[declared.grad_attended_RW], grad_q_RW, own);
  c.ops.add_rotate_backward(rotation_of_queries(c), gated ? held[declared.query_RW] : saved.q_RW, grad_q_RW,
                            gated ? held[declared.grad_query_RW] : out.q_RW, grads.q_norm_D);
  if (gated) c.ops.convert(held[declared.grad_query_RW].view({-1, c.shape.head_dim}), without_gates(c, out.q_RW));
  if (c.shape.has_latents()) {
    if (keeps_latents(c)) return out;  // the same is done for all rows of the path
    const at::Tensor& sum_TK = held[declared.grad_rotary_key_sum_TK];
    if (!gives) c.ops.expand_heads_backward(own.k, own.v, out.kv_TW, sum_TK);
    c.ops.add_rotate_backward(rotation_of_shared_keys(c), saved.rotary_key_TK, sum_TK, out.rotary_key_TK, at::Tensor());
    return out;
  }
  const std::int64_t K = c.shape.key_width(), V = c.shape.value_width();
  c.ops.add_rotate_backward(rotation_of_keys(c), saved.kv_TW.narrow(1, 0, K), own.k.view({s.rows, K}),
                            out.kv_TW.narrow(1, 0, K), grads.k_norm_D);
  c.ops.convert(own.v.view({s.rows, V}), out.kv_TW.narrow(1, K, V));
  return out;
}

// The projections that read rows; of latent attention those to latents.
struct RowProjections {
  const Projection *query, *key_value;
};
RowProjections projections_of_rows(const LayerContext& c, const LayerViews& views) {
  return {c.shape.latent.query > 0 ? &views.query_latent : &views.query,
          c.shape.has_latents() ? &views.key_value_latent : &views.key_value};
}

// The gradient of what projections_of_rows give; that of heads is taken through the latents' norm.
at::Tensor add_latent_key_value_backward(const LayerContext& c, const LayerSaved& saved,
                                         const ProjectionGradients& grad, const LayerBackwardBuffers& declared,
                                         const HeldBuffers& held, const LayerViews& grads) {
  if (!c.shape.has_latents()) return grad.kv_TW;
  const at::Tensor &normed_TC = held[declared.latent_TC], &product = held[declared.kv_product],
                   &grad_latent_TC = held[declared.grad_latent_TC];
  const Latent weights = key_value_latent(c.weights), of_grads = key_value_latent(grads);
  if (gives_latents(c)) {  // the source has done the rest
    latent_norm_backward(c, weights, of_grads, key_value_latent_of(saved), grad.normed_latent_TC, grad_latent_TC);
    return grad_latent_TC;
  }
  if (carries_latents(c)) add_expand_path_backward(c, of_grads.up, c.kv.path_rows_with_own(), product);
  if (keeps_latents(c)) {
    const KvPath::Latents own = c.kv.path_of_latents()->top_latents(c.layer);
    c.ops.add_rotate_backward(rotation_of_shared_keys(c), saved.rotary_key_TK, own.grad_rotary_PK, grad.rotary_key_TK,
                              at::Tensor());
    c.ops.convert(own.grad_latent_PC, normed_TC);
    latent_norm_backward(c, weights, of_grads, key_value_latent_of(saved), normed_TC, grad_latent_TC);
  } else {
    add_latent_backward(c, weights, of_grads, key_value_latent_of(saved), grad.kv_TW, normed_TC, product,
                        grad_latent_TC);
  }
  return grad_latent_TC;
}
at::Tensor add_latent_query_backward(const LayerContext& c, const LayerSaved& saved, const ProjectionGradients& grad,
                                     const LayerBackwardBuffers& declared, const HeldBuffers& held,
                                     const LayerViews& grads) {
  if (c.shape.latent.query == 0) return grad.q_RW;
  add_latent_backward(c, query_latent(c.weights), query_latent(grads), query_latent_of(saved), grad.q_RW,
                      held[declared.query_latent_RC], held[declared.query_product],
                      held[declared.grad_query_latent_RC]);
  return held[declared.grad_query_latent_RC];
}

// Rows of a product's place, as many as it has.
at::Tensor first_of(const at::Tensor& product_NK, std::int64_t rows) {
  return product_NK.defined() ? product_NK.narrow(0, 0, rows) : product_NK;
}

}  // namespace

void take_attention_saved(const LayerContext& c, LayerSaved& saved) {
  const AttentionSavedBuffers declared(c.block(), c.block_rows());
  const auto take = [&](BufferList::Place place) { return c.arena.take(declared, place, c.dtype()); };
  saved.norm_rstd_T = take(declared.norm_rstd_T);
  saved.query_latent_RC = take(declared.query_latent_RC);
  saved.query_latent_rstd_R = take(declared.query_latent_rstd_R);
  saved.latent_TC = take(declared.latent_TC);
  saved.latent_rstd_T = take(declared.latent_rstd_T);
  saved.rotary_key_TK = take(declared.rotary_key_TK);
  saved.kv_TW = take(declared.kv_TW);
  saved.q_RW = take(declared.q_RW);
  saved.attended_RW = take(declared.attended_RW);
  saved.projected_TW = take(declared.projected_TW);
  saved.mixed_TV = take(declared.mixed_TV);
  saved.gate_latents_TC = take(declared.gate_latents_TC);
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
  saved.shared_gate_up_RW = take(declared.shared_gate_up_RW);
  saved.shared_logit_R1 = take(declared.shared_logit_R1);
  saved.shared_weight_R1 = take(declared.shared_weight_R1);
}

namespace {

// As attend wrote them: for all queries, or for runs of them.
void join_sinks(const LayerContext& c, const LayerSaved& saved) {
  const std::int64_t heads = saved.lse_HR.size(0);
  std::vector<std::int64_t> runs = c.kv.query_runs();
  if (runs.empty()) runs = {saved.lse_HR.size(1)};
  std::int64_t first = 0;
  for (const std::int64_t queries : runs) {
    c.ops.join_sinks(c.weights.sinks_H, saved.attended_RW.narrow(0, first, queries),
                     saved.lse_HR.view({-1}).narrow(0, first * heads, queries * heads).view({heads, queries}));
    first += queries;
  }
}

}  // namespace

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
  project_keys_values(c, saved, normed_TM, held[declared.latent_TC]);
  if (continuing > 0)
    project_queries(c, saved, c.continuing_rows(normed_TM, held[declared.query_input_RM]),
                    held[declared.query_latent_RC]);
  if (carries_latents(c)) {
    expand_path(c, c.kv.path_rows());
    if (keeps_latents(c)) keep_latents(c, key_value_latent_of(saved), saved.rotary_key_TK);
  }
  held.enter(Stage::attention);
  LayerAttention attention = make_attention(c, saved, true, held[declared.rotated_q_RW], held[declared.rotated_k_TW],
                                            held[declared.value_TW], held[declared.query_RW]);
  const SourceLatents given = latents_of(c, saved, nullptr);
  if (gives_latents(c)) attention.latents = &given;
  c.kv.attend(attention, saved.attended_RW, saved.lse_HR);
  c.kv.leave(attention);
  if (continuing == 0) return;
  if (c.weights.sinks_H.defined()) join_sinks(c, saved);
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
  const bool continues = sizes_of(c).continuing > 0, latents = c.shape.has_latents(),
             query_latents = c.shape.latent.query > 0;
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
  if (carries_latents(c)) {
    expand_path(c, c.kv.path_rows_with_own());
    zero_expanded_gradients(c, c.kv.path_rows_with_own());
  }
  held.enter(Stage::attention);
  const ProjectionGradients grad = add_attention_backward(c, saved, declared, held, grads);
  held.enter(Stage::key_value);
  const at::Tensor &grad_normed_TM = held[declared.normed_TM],  // until then the rows themselves
      &normed_TM = c.has_norms_before() ? grad_normed_TM : saved.stream_in_TM;
  const RowProjections weights = projections_of_rows(c, c.weights), grad_weights = projections_of_rows(c, grads);
  if (c.has_norms_before() && (grad_weights.key_value->trains() || grad_weights.query->trains()))
    c.ops.norm_again(saved.stream_in_TM, c.attention_norm(c.weights), saved.norm_rstd_T, normed_TM);
  const at::Tensor grad_kv_TW = add_latent_key_value_backward(c, saved, grad, declared, held, grads);
  c.products.add_linear_grad_weight(
      *grad_weights.key_value, *weights.key_value, grad_kv_TW, normed_TM,
      latents ? first_of(held[declared.latent_product], c.shape.latent.key_value) : held[declared.kv_product]);
  if (latents)
    c.products.add_linear_grad_weight(grads.rotary_key, c.weights.rotary_key, grad.rotary_key_TK, normed_TM,
                                      first_of(held[declared.latent_product], c.shape.latent.rotary));
  held.enter(Stage::query);
  const at::Tensor grad_q_RW = continues ? add_latent_query_backward(c, saved, grad, declared, held, grads) : grad.q_RW;
  if (continues && grad_weights.query->trains())
    c.products.add_linear_grad_weight(*grad_weights.query, *weights.query, grad_q_RW,
                                      c.continuing_rows(normed_TM, held[declared.query_input_RM]),
                                      held[query_latents ? declared.query_latent_product : declared.query_product]);
  held.enter(Stage::input);
  c.products.linear_grad_input(grad_normed_TM, grad_kv_TW, *weights.key_value);
  if (latents) c.products.add_linear_grad_input(grad_normed_TM, grad.rotary_key_TK, c.weights.rotary_key);
  if (c.narrow && continues) {
    const at::Tensor& part_RM = held[declared.query_part_RM];
    c.products.linear_grad_input(part_RM, grad_q_RW, *weights.query);
    c.ops.add_scatter(part_RM, c.input.output_row_O, grad_normed_TM);
  } else if (!c.narrow) {
    c.products.add_linear_grad_input(grad_normed_TM, grad_q_RW, *weights.query);
  }
  c.mesh.tp.add_over_ranks(grad_normed_TM);
  if (c.has_norms_before())
    c.ops.add_norm_backward(saved.stream_in_TM, c.attention_norm(c.weights), saved.norm_rstd_T, grad_normed_TM,
                            grad_in_TM, c.attention_norm(grads));
  else
    c.ops.add_scaled(grad_in_TM, grad_normed_TM, 1, grad_in_TM);
}

}  // namespace espalier
