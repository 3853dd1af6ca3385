#include "espalier/model/layer.h"

#include <ATen/ATen.h>

#include <cmath>
#include <cstring>

#include "espalier/base/mutation.h"
#include "espalier/model/mlp.h"
#include "espalier/model/stream_norm.h"
#include "espalier/ops/attention/attention.h"
#include "espalier/ops/cpu/dispatch.h"
#include "espalier/ops/cpu/row_kernels.h"
#include "espalier/ops/products.h"

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
  at::Tensor x_RM = c.arena.take({c.rows.outputs(), x_TM.size(1)}, x_TM.scalar_type());
  dispatch(x_TM.scalar_type(), [&]<class T>() {
    rows::gather<T>(x_RM.size(0), x_RM.size(1), pointer<T>(x_TM), c.rows.output_row.data(), pointer<T>(x_RM));
  });
  return x_RM;
}

void scatter_continuing(const LayerContext& c, const at::Tensor& x_RM, const at::Tensor& into_TM) {
  dispatch(x_RM.scalar_type(), [&]<class T>() {
    rows::scatter_add<T, T>(x_RM.size(0), x_RM.size(1), pointer<T>(x_RM), c.rows.output_row.data(),
                            pointer<T>(into_TM));
  });
}

const std::int32_t* continuing_positions(const LayerContext& c) {
  return c.last ? c.rows.output_position.data() : c.rows.position.data();
}

rows::HeadShape head_shape(const LayerContext& c, std::int64_t rows, std::int64_t heads,
                           const std::int32_t* positions) {
  return {rows, heads, c.shape.head_dim, c.shape.rms_norm_eps, positions};
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
  Operands out;
  out.q = c.arena.take({s.continuing, s.q_width}, dtype);
  if (c.rows.in_path) {
    const KvPath::Layer own = c.path.top(c.layer);
    out.k = own.k.view({s.rows, s.kv_width});
    out.v = own.v.view({s.rows, s.kv_width});
  } else {
    out.k = c.arena.take({s.rows, s.kv_width}, dtype);
    out.v = saved.kv_TW.narrow(1, s.kv_width, s.kv_width);
  }
  dispatch(dtype, [&]<class T>() {
    using A = accumulator_t<T>;
    const A* cos = pointer<A>(c.rotary.cos);
    const A* sin = pointer<A>(c.rotary.sin);
    rows::norm_rotate<T>(head_shape(c, s.continuing, c.shape.heads, continuing_positions(c)), pointer<T>(saved.q_RW),
                         s.q_width, pointer<T>(c.weights.q_norm_D), cos, sin, pointer<T>(out.q), s.q_width);
    if (c.rows.in_path && !write_path) return;
    rows::norm_rotate<T>(head_shape(c, s.rows, c.shape.kv_heads, c.rows.position.data()), pointer<T>(saved.kv_TW),
                         2 * s.kv_width, pointer<T>(c.weights.k_norm_D), cos, sin, pointer<T>(out.k), s.kv_width);
    if (c.rows.in_path)
      rows::convert<T, T>(s.rows, s.kv_width, pointer<T>(saved.kv_TW) + s.kv_width, 2 * s.kv_width, pointer<T>(out.v),
                          s.kv_width);
  });
  if (ESPALIER_MUTATION(gqa_head_mixup)) out.q.copy_(out.q.roll(c.shape.head_dim, 1));
  return out;
}

attention::Shape attention_shape(const LayerContext& c) {
  const Sizes s = sizes_of(c);
  attention::Shape shape;
  shape.query_rows = s.continuing;
  shape.own_rows = s.rows;
  shape.path_rows = c.rows.path_rows;
  if (ESPALIER_MUTATION(path_cut_short) && shape.path_rows > 0) --shape.path_rows;
  shape.heads = c.shape.heads;
  shape.kv_heads = c.shape.kv_heads;
  shape.head_dim = c.shape.head_dim;
  shape.scale = 1.0 / std::sqrt(static_cast<double>(c.shape.head_dim));
  shape.query_row = c.last ? c.rows.output_row.data() : nullptr;
  shape.subtree_end = c.rows.subtree_end.data();
  return shape;
}

template <class T>
attention::Inputs<T> attention_inputs(const Operands& operands, const KvPath::Layer& path) {
  auto rows = [](const at::Tensor& x) { return attention::Rows<const T>{pointer<T>(x), x.stride(0)}; };
  return {rows(operands.q), rows(operands.k), rows(operands.v), rows(path.k), rows(path.v)};
}

// Copies the keys and values of rows that belong to groups to where their groups keep them.
void append_to_groups(const LayerContext& c, const Operands& operands) {
  const auto size = static_cast<std::int64_t>(operands.k.element_size());
  const auto width = static_cast<std::size_t>(sizes_of(c).kv_width * size);
  const auto row_of = [&](const at::Tensor& x, std::int64_t row) {
    return static_cast<char*>(x.data_ptr()) + row * x.stride(0) * size;
  };
  std::int64_t row = 0;
  for (const RowGroup& group : c.rows.groups) {
    const KvPath::Layer own = group.own->path(c.layer, static_cast<std::int64_t>(group.subtree_end.size()));
    for (const std::int32_t at : group.own_row) {
      std::memcpy(row_of(own.k, at), row_of(operands.k, row), width);
      std::memcpy(row_of(own.v, at), row_of(operands.v, row), width);
      ++row;
    }
  }
}

// Attention of rows that belong to groups, one call for each group that has queries.
void attend_in_groups(const LayerContext& c, const Operands& operands, const LayerSaved& saved) {
  const Sizes s = sizes_of(c);
  std::int64_t first_row = 0, first_query = 0;
  std::vector<std::int32_t> query_row;
  for (const RowGroup& group : c.rows.groups) {
    const auto rows = static_cast<std::int64_t>(group.own_row.size());
    query_row.clear();
    if (!c.last) query_row = group.own_row;
    for (std::int64_t o = first_query; c.last && o < c.rows.outputs() && c.rows.output_row[o] < first_row + rows; ++o)
      query_row.push_back(group.own_row[c.rows.output_row[o] - first_row]);
    const auto queries = static_cast<std::int64_t>(query_row.size());
    attention::Shape shape = attention_shape(c);
    shape.query_rows = queries;
    shape.query_row = query_row.data();
    shape.own_rows = static_cast<std::int64_t>(group.subtree_end.size());
    shape.subtree_end = group.subtree_end.data();
    shape.path_rows = group.path_rows;
    const KvPath::Layer own = group.own->path(c.layer, shape.own_rows);
    const Operands read{operands.q.narrow(0, first_query, queries), own.k, own.v};
    dispatch(dtype_of(c), [&]<class T>() {
      attention::forward<T>(shape, attention_inputs<T>(read, group.path->path(c.layer, group.path_rows)),
                            {pointer<T>(saved.attended_RW) + first_query * s.q_width, s.q_width},
                            pointer<accumulator_t<T>>(saved.lse_HR) + first_query * c.shape.heads);
    });
    first_row += rows;
    first_query += queries;
  }
}

// Overwrites saved.attended and saved.lse. With groups lse is scratch: each group's part in its own order.
void attend(const LayerContext& c, const Operands& operands, const LayerSaved& saved) {
  const TimedPart timed(c.timer, part::kAttention);
  if (!c.rows.groups.empty()) return attend_in_groups(c, operands, saved);
  dispatch(dtype_of(c), [&]<class T>() {
    attention::forward<T>(attention_shape(c), attention_inputs<T>(operands, c.path.path(c.layer, c.rows.path_rows)),
                          {pointer<T>(saved.attended_RW), sizes_of(c).q_width},
                          pointer<accumulator_t<T>>(saved.lse_HR));
  });
}

// dL/dq, dL/dk, dL/dv of the projections' outputs from dL/d(attended).
struct ProjectionGradients {
  at::Tensor q_RW, kv_TW;
};

ProjectionGradients attention_backward(const LayerContext& c, const LayerSaved& saved,
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
    own.grad_k = c.arena.take({s.rows, s.kv_width}, accumulator_type(dtype)).zero_();
    own.grad_v = c.arena.take({s.rows, s.kv_width}, accumulator_type(dtype)).zero_();
  }
  KvPath::Layer path = c.path.path(c.layer, c.rows.path_rows);
  if (c.rows.path_rows * s.continuing > 0 && ESPALIER_MUTATION(wave_gradient_lost)) path.grad_k = path.grad_k.clone();
  if (c.rows.path_rows > 0 && ESPALIER_MUTATION(unmerged_lse)) saved.lse_HR.sub_(0.01);
  dispatch(dtype, [&]<class T>() {
    using A = accumulator_t<T>;
    attention::Gradients<T> grad;
    grad.q = {pointer<T>(grad_q_RW), s.q_width};
    grad.own_k = {pointer<A>(own.grad_k), s.kv_width};
    grad.own_v = {pointer<A>(own.grad_v), s.kv_width};
    grad.path_k = {pointer<A>(path.grad_k), s.kv_width};
    grad.path_v = {pointer<A>(path.grad_v), s.kv_width};
    if (s.continuing > 0) {
      const TimedPart timed(c.timer, part::kAttention);
      attention::backward<T>(attention_shape(c), attention_inputs<T>(operands, path),
                             {pointer<T>(saved.attended_RW), s.q_width}, pointer<A>(saved.lse_HR),
                             {pointer<T>(grad_attended_RW), s.q_width}, grad);
    }
    const A* cos = pointer<A>(c.rotary.cos);
    const A* sin = pointer<A>(c.rotary.sin);
    rows::norm_rotate_backward<T, T>(head_shape(c, s.continuing, c.shape.heads, continuing_positions(c)),
                                     pointer<T>(saved.q_RW), s.q_width, pointer<T>(c.weights.q_norm_D), cos, sin,
                                     pointer<T>(grad_q_RW), s.q_width, pointer<T>(out.q_RW), s.q_width,
                                     pointer<A>(grads.q_norm_D));
    rows::norm_rotate_backward<T, A>(head_shape(c, s.rows, c.shape.kv_heads, c.rows.position.data()),
                                     pointer<T>(saved.kv_TW), 2 * s.kv_width, pointer<T>(c.weights.k_norm_D), cos, sin,
                                     pointer<A>(own.grad_k), s.kv_width, pointer<T>(out.kv_TW), 2 * s.kv_width,
                                     pointer<A>(grads.k_norm_D));
    rows::convert<A, T>(s.rows, s.kv_width, pointer<A>(own.grad_v), s.kv_width, pointer<T>(out.kv_TW) + s.kv_width,
                        2 * s.kv_width);
  });
  if (c.rows.path_rows > 0 && ESPALIER_MUTATION(contribution_uncounted)) return out;
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
    norm_forward(saved.stream_in_TM, c.weights.attention_norm_M, c.shape.rms_norm_eps, normed_TM, saved.norm_rstd_T);
    linear(saved.kv_TW, normed_TM, c.weights.kv_weight, c.weights.kv_bias, c.timer);
    if (s.continuing > 0)
      linear(saved.q_RW, continuing_rows(c, normed_TM), c.weights.q_weight, c.weights.q_bias, c.timer);
  }
  {
    const ArenaScope operands_scope(c.arena);
    const Operands operands = make_operands(c, saved, true);
    if (!c.rows.groups.empty()) append_to_groups(c, operands);
    if (s.continuing == 0) return;
    attend(c, operands, saved);
  }
  {
    const ArenaScope residual(c.arena);
    linear_onto(saved.stream_mid_RM, continuing_rows(c, saved.stream_in_TM), saved.attended_RW, c.weights.output_weight,
                c.weights.output_bias, c.timer);
  }
  mlp_forward(c, saved, stream_out_RM);
}

void layer_backward(const LayerContext& c, LayerSaved& saved, const at::Tensor& grad_stream_RM,
                    const at::Tensor& grad_in_TM, const LayerViews& grads) {
  const Sizes s = sizes_of(c);
  const at::ScalarType dtype = dtype_of(c);
  const ArenaScope scope(c.arena);
  if (c.last) grad_in_TM.zero_();
  const at::Tensor grad_attended_RW = c.arena.take({s.continuing, s.q_width}, dtype);
  if (s.continuing > 0) {
    mlp_backward(c, saved, grad_stream_RM, grads);
    add_linear_grad_weight(grads.output_weight, grads.output_bias, grad_stream_RM, saved.attended_RW, c.arena, c.timer);
    compute_linear_grad_input(grad_attended_RW, grad_stream_RM, c.weights.output_weight, c.timer);
    if (c.last && !ESPALIER_MUTATION(last_layer_residual_lost)) scatter_continuing(c, grad_stream_RM, grad_in_TM);
  }
  const ProjectionGradients grad = attention_backward(c, saved, grad_attended_RW, grads);
  if (ESPALIER_MUTATION(last_layer_rows_forgotten) && s.continuing == 0) grad.kv_TW.zero_();
  const at::Tensor normed_TM = c.arena.take({s.rows, s.width}, dtype);
  norm_again(saved.stream_in_TM, c.weights.attention_norm_M, saved.norm_rstd_T, normed_TM);
  add_linear_grad_weight(grads.kv_weight, grads.kv_bias, grad.kv_TW, normed_TM, c.arena, c.timer);
  if (s.continuing > 0) {
    const ArenaScope gathered(c.arena);
    add_linear_grad_weight(grads.q_weight, grads.q_bias, grad.q_RW, continuing_rows(c, normed_TM), c.arena, c.timer);
  }
  const at::Tensor& grad_normed_TM = normed_TM;  // its values are no longer needed
  compute_linear_grad_input(grad_normed_TM, grad.kv_TW, c.weights.kv_weight, c.timer);
  if (c.last && s.continuing > 0) {
    const at::Tensor part_RM = c.arena.take({s.continuing, s.width}, dtype);
    compute_linear_grad_input(part_RM, grad.q_RW, c.weights.q_weight, c.timer);
    scatter_continuing(c, part_RM, grad_normed_TM);
  } else if (!c.last) {
    add_linear_grad_input(grad_normed_TM, grad.q_RW, c.weights.q_weight, c.timer);
  }
  norm_backward(saved.stream_in_TM, c.weights.attention_norm_M, saved.norm_rstd_T, grad_normed_TM, grad_in_TM,
                grads.attention_norm_M);
}

}  // namespace espalier
