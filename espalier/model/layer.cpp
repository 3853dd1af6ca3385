#include "espalier/model/layer.h"

#include <ATen/ATen.h>

#include "espalier/device/scalar_type.h"
#include "espalier/model/mlp.h"

namespace espalier {
namespace {

struct Sizes {
  std::int64_t rows, continuing, width, q_width, kv_width;  // T, R, M, H*D, J*D
};

Sizes sizes_of(const LayerContext& c) {
  return {c.rows.rows(), c.last ? c.rows.outputs() : c.rows.rows(), c.shape.hidden, c.shape.heads * c.shape.head_dim,
          c.shape.kv_heads * c.shape.head_dim};
}

at::ScalarType dtype_of(const LayerContext& c) { return c.weights.q_weight.scalar_type(); }

// x_R = x_T at the output rows; x itself in blocks where all rows continue.
at::Tensor continuing_rows(const LayerContext& c, const at::Tensor& x_TM) {
  if (!c.last) return x_TM;
  const at::Tensor x_RM = c.arena.take({c.rows.outputs(), x_TM.size(1)}, x_TM.scalar_type());
  c.ops.gather(x_TM, c.rows.output_row_O, x_RM);
  return x_RM;
}

Rotation rotation_of_queries(const LayerContext& c) {
  return {c.rotary, c.last ? c.rows.output_position_O : c.rows.position_T, c.weights.q_norm_D, c.shape.rms_norm_eps};
}
Rotation rotation_of_keys(const LayerContext& c) {
  return {c.rotary, c.rows.position_T, c.weights.k_norm_D, c.shape.rms_norm_eps};
}

// The operands of attention: rotated queries and keys, and where own values lie.
struct Operands {
  at::Tensor q, k, v;
};

// Queries and keys as attention reads them, from what was saved. Keys and values of a trunk live in the path; they are
// written there in its first forward only.
Operands make_operands(const LayerContext& c, const LayerSaved& saved, bool write_path) {
  const Sizes s = sizes_of(c);
  const at::ScalarType dtype = dtype_of(c);
  const at::Tensor k_TW = saved.kv_TW.narrow(1, 0, s.kv_width), v_TW = saved.kv_TW.narrow(1, s.kv_width, s.kv_width);
  Operands out;
  out.q = c.arena.take({s.continuing, s.q_width}, dtype);
  if (c.rows.in_path) {
    const KvPath::Layer own = c.path.top(c.layer);
    out.k = own.k.view({s.rows, s.kv_width});
    out.v = own.v.view({s.rows, s.kv_width});
  } else {
    out.k = c.arena.take({s.rows, s.kv_width}, dtype);
    out.v = v_TW;
  }
  c.ops.rotate(rotation_of_queries(c), saved.q_RW, out.q);
  if (!c.rows.in_path || write_path) c.ops.rotate(rotation_of_keys(c), k_TW, out.k);
  if (c.rows.in_path && write_path) c.ops.convert(v_TW, out.v);
  return out;
}

AttentionProblem attention_problem(const LayerContext& c, const Operands& operands, const KvPath::Layer& path) {
  return {c.shape.head_dim,
          operands.q,
          operands.k,
          operands.v,
          path.k,
          path.v,
          c.last ? c.rows.output_row_O : at::Tensor(),
          c.rows.subtree_end_T};
}

// Attention of rows that belong to groups, one call for each group that has queries, after their keys and values are
// where their groups keep them.
void attend_in_groups(const LayerContext& c, const Operands& operands, const LayerSaved& saved) {
  std::int64_t first_row = 0, first_query = 0;
  for (const RowGroup& group : c.rows.groups) {
    const at::Tensor& query_row = c.last ? group.output_own_row : group.own_row_N;
    const std::int64_t rows = group.own_row_N.size(0), queries = query_row.size(0);
    const KvPath::Layer own = group.own->path(c.layer, group.subtree_end_T.size(0));
    c.ops.scatter(operands.k.narrow(0, first_row, rows), group.own_row_N, own.k);
    c.ops.scatter(operands.v.narrow(0, first_row, rows), group.own_row_N, own.v);
    const KvPath::Layer path = group.path->path(c.layer, group.path_rows);
    const TimedPart timed(c.timer, part::kAttention);
    c.ops.attention({c.shape.head_dim, operands.q.narrow(0, first_query, queries), own.k, own.v, path.k, path.v,
                     query_row, group.subtree_end_T},
                    saved.attended_RW.narrow(0, first_query, queries),
                    saved.lse_HR.view({-1}).narrow(0, first_query * c.shape.heads, queries * c.shape.heads));
    first_row += rows;
    first_query += queries;
  }
}

// Overwrites saved.attended and saved.lse. With groups lse is scratch: each group's part in its own order.
void attend(const LayerContext& c, const Operands& operands, const LayerSaved& saved) {
  if (!c.rows.groups.empty()) return attend_in_groups(c, operands, saved);
  if (sizes_of(c).continuing == 0) return;
  const TimedPart timed(c.timer, part::kAttention);
  c.ops.attention(attention_problem(c, operands, c.path.path(c.layer, c.rows.path_rows)), saved.attended_RW,
                  saved.lse_HR);
}

// dL/dq, dL/dk, dL/dv of the projections' outputs from dL/d(attended).
struct ProjectionGradients {
  at::Tensor q_RW, kv_TW;
};

ProjectionGradients add_attention_backward(const LayerContext& c, const LayerSaved& saved,
                                           const at::Tensor& grad_attended_RW, const LayerViews& grads) {
  const Sizes s = sizes_of(c);
  const at::ScalarType dtype = dtype_of(c);
  ProjectionGradients out{c.arena.take({s.continuing, s.q_width}, dtype),
                          c.arena.take({s.rows, 2 * s.kv_width}, dtype)};
  const ArenaScope scope(c.arena);
  const Operands operands = make_operands(c, saved, false);
  const at::Tensor grad_q_RW = c.arena.take({s.continuing, s.q_width}, dtype);
  KvPath::Layer own;
  if (c.rows.in_path) {
    c.path.expect_complete(c.layer);
    own = c.path.top(c.layer);
  } else {
    own.grad_k = c.arena.take({s.rows, s.kv_width}, accumulator_type(dtype));
    own.grad_v = c.arena.take({s.rows, s.kv_width}, accumulator_type(dtype));
    c.ops.zero(own.grad_k);
    c.ops.zero(own.grad_v);
  }
  const KvPath::Layer path = c.path.path(c.layer, c.rows.path_rows);
  if (s.continuing > 0) {
    const TimedPart timed(c.timer, part::kAttention);
    c.ops.add_attention_backward(attention_problem(c, operands, path), saved.attended_RW, saved.lse_HR,
                                 grad_attended_RW, {grad_q_RW, own.grad_k, own.grad_v, path.grad_k, path.grad_v});
  }
  const auto grad_k_TW = own.grad_k.view({s.rows, s.kv_width}), grad_v_TW = own.grad_v.view({s.rows, s.kv_width});
  c.ops.add_rotate_backward(rotation_of_queries(c), saved.q_RW, grad_q_RW, out.q_RW, grads.q_norm_D);
  c.ops.add_rotate_backward(rotation_of_keys(c), saved.kv_TW.narrow(1, 0, s.kv_width), grad_k_TW,
                            out.kv_TW.narrow(1, 0, s.kv_width), grads.k_norm_D);
  c.ops.convert(grad_v_TW, out.kv_TW.narrow(1, s.kv_width, s.kv_width));
  c.path.count_contribution(c.layer, c.rows.path_rows);
  return out;
}

}  // namespace

LayerSaved take_layer_saved(const LayerContext& c, const at::Tensor& stream_in_TM) {
  const Sizes s = sizes_of(c);
  const at::ScalarType dtype = dtype_of(c), sums = accumulator_type(dtype);
  LayerSaved saved;
  saved.stream_in_TM = stream_in_TM;
  saved.norm_rstd_T = c.arena.take({s.rows}, sums);
  saved.kv_TW = c.arena.take({s.rows, 2 * s.kv_width}, dtype);
  saved.q_RW = c.arena.take({s.continuing, s.q_width}, dtype);
  saved.attended_RW = c.arena.take({s.continuing, s.q_width}, dtype);
  saved.lse_HR = c.arena.take({c.shape.heads, s.continuing}, sums);
  saved.stream_mid_RM = c.arena.take({s.continuing, s.width}, dtype);
  take_mlp_saved(c, saved, s.continuing);
  return saved;
}

void layer_forward(const LayerContext& c, LayerSaved& saved, const at::Tensor& stream_out_RM) {
  const Sizes s = sizes_of(c);
  const at::ScalarType dtype = dtype_of(c);
  const ArenaScope scope(c.arena);
  {
    const ArenaScope projection(c.arena);
    const at::Tensor normed_TM = c.arena.take({s.rows, s.width}, dtype);
    c.ops.norm(saved.stream_in_TM, c.weights.attention_norm_M, c.shape.rms_norm_eps, normed_TM, saved.norm_rstd_T);
    c.products.linear(saved.kv_TW, normed_TM, c.weights.kv_weight, c.weights.kv_bias);
    if (s.continuing > 0)
      c.products.linear(saved.q_RW, continuing_rows(c, normed_TM), c.weights.q_weight, c.weights.q_bias);
  }
  {
    const ArenaScope operands_scope(c.arena);
    attend(c, make_operands(c, saved, true), saved);
  }
  if (s.continuing == 0) return;
  {
    const ArenaScope residual(c.arena);
    c.products.linear_onto(saved.stream_mid_RM, continuing_rows(c, saved.stream_in_TM), saved.attended_RW,
                           c.weights.output_weight, c.weights.output_bias);
  }
  mlp_forward(c, saved, stream_out_RM);
}

void add_layer_backward(const LayerContext& c, LayerSaved& saved, const at::Tensor& grad_stream_RM,
                        const at::Tensor& grad_in_TM, const LayerViews& grads) {
  const Sizes s = sizes_of(c);
  const at::ScalarType dtype = dtype_of(c);
  const ArenaScope scope(c.arena);
  if (c.last) c.ops.zero(grad_in_TM);
  const at::Tensor grad_attended_RW = c.arena.take({s.continuing, s.q_width}, dtype);
  if (s.continuing > 0) {
    add_mlp_backward(c, saved, grad_stream_RM, grads);
    c.products.add_linear_grad_weight(grads.output_weight, grads.output_bias, grad_stream_RM, saved.attended_RW);
    c.products.linear_grad_input(grad_attended_RW, grad_stream_RM, c.weights.output_weight);
    if (c.last) c.ops.add_scatter(grad_stream_RM, c.rows.output_row_O, grad_in_TM);
  }
  const ProjectionGradients grad = add_attention_backward(c, saved, grad_attended_RW, grads);
  const at::Tensor normed_TM = c.arena.take({s.rows, s.width}, dtype);
  c.ops.norm_again(saved.stream_in_TM, c.weights.attention_norm_M, saved.norm_rstd_T, normed_TM);
  c.products.add_linear_grad_weight(grads.kv_weight, grads.kv_bias, grad.kv_TW, normed_TM);
  if (s.continuing > 0) {
    const ArenaScope gathered(c.arena);
    c.products.add_linear_grad_weight(grads.q_weight, grads.q_bias, grad.q_RW, continuing_rows(c, normed_TM));
  }
  const at::Tensor& grad_normed_TM = normed_TM;  // its values are no longer needed
  c.products.linear_grad_input(grad_normed_TM, grad.kv_TW, c.weights.kv_weight);
  if (c.last && s.continuing > 0) {
    const at::Tensor part_RM = c.arena.take({s.continuing, s.width}, dtype);
    c.products.linear_grad_input(part_RM, grad.q_RW, c.weights.q_weight);
    c.ops.add_scatter(part_RM, c.rows.output_row_O, grad_normed_TM);
  } else if (!c.last) {
    c.products.add_linear_grad_input(grad_normed_TM, grad.q_RW, c.weights.q_weight);
  }
  c.ops.add_norm_backward(saved.stream_in_TM, c.weights.attention_norm_M, saved.norm_rstd_T, grad_normed_TM, grad_in_TM,
                          grads.attention_norm_M);
}

}  // namespace espalier
