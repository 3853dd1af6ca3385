// Attention on a CPU: tensors to the kernels of ops/attention/attention.h.
#include <cmath>

#include "espalier/base/error.h"
#include "espalier/ops/attention/attention.h"
#include "espalier/ops/cpu/dispatch.h"
#include "espalier/ops/cpu/operations.h"

namespace espalier::cpu {
namespace {

attention::Shape shape_of(const AttentionProblem& p) {
  const auto heads_in = [&](const at::Tensor& rows) {
    return (rows.dim() == 3 ? rows.size(1) * rows.size(2) : rows.size(1)) / p.head_dim;
  };
  attention::Shape shape;
  shape.query_rows = p.q_Q.size(0);
  shape.own_rows = p.own_k_T.size(0);
  shape.path_rows = p.path_k_P.size(0);
  shape.heads = heads_in(p.q_Q);
  shape.kv_heads = heads_in(p.own_k_T);
  shape.head_dim = p.head_dim;
  shape.scale = 1.0 / std::sqrt(static_cast<double>(p.head_dim));
  shape.query_row = pointer<std::int32_t>(p.query_row_Q);
  shape.subtree_end = pointer<std::int32_t>(p.subtree_end_T);
  ESPALIER_INTERNAL_EQ(p.subtree_end_T.size(0), shape.own_rows);
  return shape;
}

template <class T>
attention::Rows<T> rows_of(const at::Tensor& x) {
  return {pointer<std::remove_const_t<T>>(x), x.stride(0)};
}

template <class T>
attention::Inputs<T> inputs_of(const AttentionProblem& p) {
  return {rows_of<const T>(p.q_Q), rows_of<const T>(p.own_k_T), rows_of<const T>(p.own_v_T),
          rows_of<const T>(p.path_k_P), rows_of<const T>(p.path_v_P)};
}

void attention(const AttentionProblem& problem, const at::Tensor& out, const at::Tensor& lse) {
  dispatch(out.scalar_type(), [&]<class T>() {
    attention::forward<T>(shape_of(problem), inputs_of<T>(problem), rows_of<T>(out), pointer<accumulator_t<T>>(lse));
  });
}

void add_attention_backward(const AttentionProblem& problem, const at::Tensor& out, const at::Tensor& lse,
                            const at::Tensor& grad_out, const AttentionGradients& gradients) {
  dispatch(out.scalar_type(), [&]<class T>() {
    using A = accumulator_t<T>;
    const attention::Gradients<T> to{rows_of<T>(gradients.q_Q), rows_of<A>(gradients.own_k_T),
                                     rows_of<A>(gradients.own_v_T), rows_of<A>(gradients.path_k_P),
                                     rows_of<A>(gradients.path_v_P)};
    attention::add_backward<T>(shape_of(problem), inputs_of<T>(problem), rows_of<const T>(out), pointer<A>(lse),
                               rows_of<const T>(grad_out), to);
  });
}

}  // namespace

AttentionOperations attention_operations() { return {attention, add_attention_backward}; }

}  // namespace espalier::cpu
