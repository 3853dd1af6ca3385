// Converts an attention problem on tensors to one on rows, the form that the devices' kernels take.
#pragma once

#include <type_traits>

#include "espalier/ops/attention/operations.h"
#include "espalier/ops/attention/rows.h"
#include "espalier/ops/dispatch.h"

namespace espalier::attention {

inline Shape shape_of(const AttentionProblem& p) {
  Shape shape;
  shape.query_rows = p.q_Q.size(0);
  shape.own_rows = p.own_k_T.size(0);
  shape.path_rows = p.path_k_P.size(0);
  shape.heads = AttentionProblem::columns_of(p.q_Q) / p.head_dim;
  shape.kv_heads = p.kv_heads();
  shape.value_dim = p.value_dim();
  shape.head_dim = p.head_dim;
  shape.scale = p.score_scale();
  shape.soft_cap = p.soft_cap;
  shape.query_row = pointer<std::int32_t>(p.query_row_Q);
  shape.subtree_end = pointer<std::int32_t>(p.subtree_end_T);
  ESPALIER_INTERNAL_EQ(p.subtree_end_T.size(0), shape.own_rows);
  shape.window = p.window;
  if (p.window == 0) return shape;
  shape.depth = pointer<std::int32_t>(p.depth_T);
  ESPALIER_INTERNAL_EQ(p.depth_T.size(0), shape.own_rows);
  return shape;
}

template <class T>
Rows<T> rows_of(const at::Tensor& x) {
  return {pointer<std::remove_const_t<T>>(x), x.stride(0)};
}

template <class T>
Inputs<T> inputs_of(const AttentionProblem& p) {
  return {rows_of<const T>(p.q_Q), rows_of<const T>(p.own_k_T), rows_of<const T>(p.own_v_T),
          rows_of<const T>(p.path_k_P), rows_of<const T>(p.path_v_P)};
}

template <class T>
Gradients<T> gradients_of(const AttentionGradients& g) {
  using A = accumulator_t<T>;
  return {rows_of<T>(g.q_Q), rows_of<A>(g.own_k_T), rows_of<A>(g.own_v_T), rows_of<A>(g.path_k_P),
          rows_of<A>(g.path_v_P)};
}

}  // namespace espalier::attention
