// Attention on a GPU: tensors to the kernels of attention.h.
#include "espalier/ops/cpu/attention_problem.h"
#include "espalier/ops/cpu/dispatch.h"
#include "espalier/ops/cuda/attention.h"
#include "espalier/ops/cuda/operations.h"

namespace espalier::cuda {
namespace {

void check_taken(const AttentionProblem& problem) {
  if (problem.head_dim > kLargestHead)
    throw UnsupportedError({"attention", text_of("heads of at most ", kLargestHead, " elements on a GPU"),
                            text_of(problem.head_dim), "use --device cpu"});
  if (problem.value_dim() != problem.head_dim)
    throw UnsupportedError({"attention", "key and value heads of equal size on a GPU",
                            text_of(problem.head_dim, " and ", problem.value_dim()), "use --device cpu"});
  if (problem.window > 0)
    throw UnsupportedError({"attention", "layers without a sliding window on a GPU",
                            text_of("a window of ", problem.window, " rows"), "use --device cpu"});
  if (problem.soft_cap > 0)
    throw UnsupportedError({"attention", "scores without a soft cap on a GPU", text_of("a cap of ", problem.soft_cap),
                            "use --device cpu"});
}

// Whether rows of bfloat16 stand at multiples of 16 bytes.
bool in_pieces(const at::Tensor& x) {
  return x.stride(0) % 8 == 0 && reinterpret_cast<std::uintptr_t>(x.data_ptr()) % 16 == 0;
}

void attention_rows(const AttentionProblem& problem, const at::Tensor& out, const at::Tensor& lse) {
  check_taken(problem);
  if (out.scalar_type() == at::kBFloat16) {
    const attention::Shape shape = attention::shape_of(problem);
    const attention::Inputs<bfloat16> in = attention::inputs_of<bfloat16>(problem);
    if (takes_tiles(shape, in) && in_pieces(out))
      return tiled_attention(shape, in, attention::rows_of<bfloat16>(out), pointer<float>(lse));
  }
  dispatch(out.scalar_type(), [&]<class T>() {
    plain_attention<T>(attention::shape_of(problem), attention::inputs_of<T>(problem), attention::rows_of<T>(out),
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
    if constexpr (std::is_same_v<T, bfloat16>)
      if (takes_tiles(shape, in) && in_pieces(grad_out) && in_pieces(gradients.q_Q))
        return add_tiled_attention_backward(shape, in, attention::rows_of<const T>(out), pointer<A>(lse),
                                            attention::rows_of<const T>(grad_out), to);
    add_plain_attention_backward<T>(shape, in, attention::rows_of<const T>(out), pointer<A>(lse),
                                    attention::rows_of<const T>(grad_out), to);
  });
}

void join_sinks(const at::Tensor&, const at::Tensor&, const at::Tensor&) {
  throw UnsupportedError({"attention", "attention without sinks on a GPU", "sinks", "use --device cpu"});
}
void add_sinks_backward(const at::Tensor& sink, const at::Tensor& out, const at::Tensor& lse, const at::Tensor&,
                        const at::Tensor&) {
  join_sinks(sink, out, lse);
}

}  // namespace

AttentionOperations attention_operations() {
  return {attention_rows, add_attention_rows_backward, join_sinks, add_sinks_backward};
}

}  // namespace espalier::cuda
