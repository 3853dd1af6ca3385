// Attention on a GPU: tensors to the kernels of attention.h.
#include <algorithm>

#include "espalier/ops/attention/rows_of_problem.h"
#include "espalier/ops/cuda/attention.h"
#include "espalier/ops/cuda/open_attention.h"
#include "espalier/ops/cuda/operations.h"
#include "espalier/ops/cuda/wide_attention.h"
#include "espalier/ops/dispatch.h"

namespace espalier::cuda {
namespace {

bool is_wide(const attention::Shape& shape) { return std::max(shape.head_dim, shape.value_dim) > kLargestHead; }

// True if rows of bfloat16 stand at multiples of 16 bytes.
bool in_pieces(const at::Tensor& x) {
  return x.stride(0) % 8 == 0 && reinterpret_cast<std::uintptr_t>(x.data_ptr()) % 16 == 0;
}

void attention_rows(const AttentionProblem& problem, const at::Tensor& out, const at::Tensor& lse) {
  const attention::Shape shape = attention::shape_of(problem);
  if (is_wide(shape))
    return dispatch(out.scalar_type(), [&]<class T>() {
      wide_attention<T>(shape, attention::inputs_of<T>(problem), attention::rows_of<T>(out),
                        pointer<accumulator_t<T>>(lse));
    });
  if (out.scalar_type() == at::kBFloat16) {
    const attention::Inputs<bfloat16> in = attention::inputs_of<bfloat16>(problem);
    if (takes_tiles(shape, in) && in_pieces(out))
      return tiled_attention(shape, in, attention::rows_of<bfloat16>(out), pointer<float>(lse));
  }
  dispatch(out.scalar_type(), [&]<class T>() {
    plain_attention<T>(shape, attention::inputs_of<T>(problem), attention::rows_of<T>(out),
                       pointer<accumulator_t<T>>(lse));
  });
}

void add_attention_rows_backward(const AttentionProblem& problem, const at::Tensor& out, const at::Tensor& lse,
                                 const at::Tensor& grad_out, const AttentionGradients& gradients) {
  dispatch(out.scalar_type(), [&]<class T>() {
    using A = accumulator_t<T>;
    const attention::Shape shape = attention::shape_of(problem);
    const attention::Inputs<T> in = attention::inputs_of<T>(problem);
    const attention::Gradients<T> to = attention::gradients_of<T>(gradients);
    if (is_wide(shape))
      return add_wide_attention_backward<T>(shape, in, attention::rows_of<const T>(out), pointer<A>(lse),
                                            attention::rows_of<const T>(grad_out), to);
    if constexpr (std::is_same_v<T, bfloat16>)
      if (takes_tiles(shape, in) && in_pieces(grad_out) && in_pieces(gradients.q_Q))
        return add_tiled_attention_backward(shape, in, attention::rows_of<const T>(out), pointer<A>(lse),
                                            attention::rows_of<const T>(grad_out), to);
    add_plain_attention_backward<T>(shape, in, attention::rows_of<const T>(out), pointer<A>(lse),
                                    attention::rows_of<const T>(grad_out), to);
  });
}

// The rows of results alone: heads, and elements of each.
attention::Shape shape_of_results(const at::Tensor& out_Q, const at::Tensor& lse_HQ) {
  attention::Shape shape;
  shape.heads = shape.kv_heads = lse_HQ.size(0), shape.query_rows = lse_HQ.size(1);
  shape.value_dim = AttentionProblem::columns_of(out_Q) / shape.heads;
  return shape;
}

void join_sink_logits(const at::Tensor& sink_H, const at::Tensor& out_Q, const at::Tensor& lse_HQ) {
  dispatch(out_Q.scalar_type(), [&]<class T>() {
    join_sinks<T>(shape_of_results(out_Q, lse_HQ), pointer<T>(sink_H), attention::rows_of<T>(out_Q),
                  pointer<accumulator_t<T>>(lse_HQ));
  });
}

void add_sink_logits_backward(const at::Tensor& sink_H, const at::Tensor& out_Q, const at::Tensor& lse_HQ,
                              const at::Tensor& grad_out_Q, const at::Tensor& grad_sink_H) {
  dispatch(out_Q.scalar_type(), [&]<class T>() {
    using A = accumulator_t<T>;
    add_sinks_backward<T>(shape_of_results(out_Q, lse_HQ), pointer<T>(sink_H), attention::rows_of<const T>(out_Q),
                          pointer<A>(lse_HQ), attention::rows_of<const T>(grad_out_Q), pointer<A>(grad_sink_H));
  });
}

}  // namespace

AttentionOperations open_own_attention(const AttentionGpu&) { return attention_operations(); }

AttentionOperations attention_operations() {
  return {attention_rows, add_attention_rows_backward, join_sink_logits, add_sink_logits_backward};
}

}  // namespace espalier::cuda
