// Attention on a GPU: tensors to the kernels of attention.h.
#include <cmath>

#include "espalier/ops/cpu/dispatch.h"
#include "espalier/ops/cuda/attention.h"
#include "espalier/ops/cuda/operations.h"

namespace espalier::cuda {
namespace {

attention::Shape shape_of(const AttentionProblem& p) {
  const auto heads_in = [&](const at::Tensor& rows) {
    return (rows.dim() == 3 ? rows.size(1) * rows.size(2) : rows.size(1)) / p.head_dim;
  };
  if (p.head_dim > kLargestHead)
    throw UnsupportedError({"attention", text_of("heads of at most ", kLargestHead, " elements on a GPU"),
                            text_of(p.head_dim), "use --device cpu"});
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

// Whether rows of bfloat16 stand at multiples of 16 bytes.
bool in_pieces(const at::Tensor& x) {
  return x.stride(0) % 8 == 0 && reinterpret_cast<std::uintptr_t>(x.data_ptr()) % 16 == 0;
}

void attention_rows(const AttentionProblem& problem, const at::Tensor& out, const at::Tensor& lse) {
  if (out.scalar_type() == at::kBFloat16) {
    const attention::Shape shape = shape_of(problem);
    const attention::Inputs<bfloat16> in = inputs_of<bfloat16>(problem);
    if (takes_tiles(shape, in) && in_pieces(out))
      return tiled_attention(shape, in, rows_of<bfloat16>(out), pointer<float>(lse));
  }
  dispatch(out.scalar_type(), [&]<class T>() {
    plain_attention<T>(shape_of(problem), inputs_of<T>(problem), rows_of<T>(out), pointer<accumulator_t<T>>(lse));
  });
}

void add_attention_rows_backward(const AttentionProblem& problem, const at::Tensor& out, const at::Tensor& lse,
                                 const at::Tensor& grad_out, const AttentionGradients& gradients) {
  dispatch(out.scalar_type(), [&]<class T>() {
    using A = accumulator_t<T>;
    const attention::Shape shape = shape_of(problem);
    const attention::Inputs<T> in = inputs_of<T>(problem);
    const attention::Gradients<T> to{rows_of<T>(gradients.q_Q), rows_of<A>(gradients.own_k_T),
                                     rows_of<A>(gradients.own_v_T), rows_of<A>(gradients.path_k_P),
                                     rows_of<A>(gradients.path_v_P)};
    if constexpr (std::is_same_v<T, bfloat16>)
      if (takes_tiles(shape, in) && in_pieces(grad_out) && in_pieces(gradients.q_Q))
        return add_tiled_attention_backward(shape, in, rows_of<const T>(out), pointer<A>(lse),
                                            rows_of<const T>(grad_out), to);
    add_plain_attention_backward<T>(shape, in, rows_of<const T>(out), pointer<A>(lse), rows_of<const T>(grad_out), to);
  });
}

}  // namespace

AttentionOperations attention_operations() { return {attention_rows, add_attention_rows_backward}; }

}  // namespace espalier::cuda
