// Attention on a CPU: tensors to the kernels of ops/attention/attention.h.
#include "espalier/ops/cpu/attention_problem.h"
#include "espalier/ops/cpu/dispatch.h"
#include "espalier/ops/cpu/operations.h"

namespace espalier::cpu {
namespace {

void attention(const AttentionProblem& problem, const at::Tensor& out, const at::Tensor& lse) {
  dispatch(out.scalar_type(), [&]<class T>() {
    attention::forward<T>(attention::shape_of(problem), attention::inputs_of<T>(problem), attention::rows_of<T>(out),
                          pointer<accumulator_t<T>>(lse));
  });
}

void add_attention_backward(const AttentionProblem& problem, const at::Tensor& out, const at::Tensor& lse,
                            const at::Tensor& grad_out, const AttentionGradients& gradients) {
  dispatch(out.scalar_type(), [&]<class T>() {
    using A = accumulator_t<T>;
    attention::add_backward<T>(attention::shape_of(problem), attention::inputs_of<T>(problem),
                               attention::rows_of<const T>(out), pointer<A>(lse), attention::rows_of<const T>(grad_out),
                               attention::gradients_of<T>(gradients));
  });
}

}  // namespace

AttentionOperations attention_operations() { return {attention, add_attention_backward}; }

}  // namespace espalier::cpu
