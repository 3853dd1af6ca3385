// Attention by the kernels for compute capability 9.0: tensors to the kernels of attention.h.
#include "espalier/ops/cuda/hopper/attention.h"

#include "espalier/ops/attention/rows_of_problem.h"
#include "espalier/ops/cuda/open_attention.h"
#include "espalier/ops/cuda/operations.h"

namespace espalier::cuda {
namespace {

attention::Rows<const bfloat16> read_rows(const at::Tensor& rows) { return attention::rows_of<const bfloat16>(rows); }

void attention_rows(const AttentionProblem& problem, const at::Tensor& out, const at::Tensor& lse) {
  if (out.scalar_type() == at::kBFloat16) {
    const attention::Shape shape = attention::shape_of(problem);
    const attention::Inputs<bfloat16> in = attention::inputs_of<bfloat16>(problem);
    if (hopper::takes_forward(shape, in, read_rows(out)))
      return hopper::forward(shape, in, attention::rows_of<bfloat16>(out), lse.data_ptr<float>());
  }
  attention_operations().attention(problem, out, lse);
}

template <bool kInTurn>
void add_attention_rows_backward(const AttentionProblem& problem, const at::Tensor& out, const at::Tensor& lse,
                                 const at::Tensor& grad_out, const AttentionGradients& gradients) {
  if (out.scalar_type() == at::kBFloat16) {
    const attention::Shape shape = attention::shape_of(problem);
    const attention::Inputs<bfloat16> in = attention::inputs_of<bfloat16>(problem);
    if (hopper::takes_backward(shape, in, read_rows(grad_out), read_rows(gradients.q_Q)))
      return hopper::add_backward(shape, in, read_rows(out), lse.data_ptr<float>(), read_rows(grad_out),
                                  attention::gradients_of<bfloat16>(gradients), kInTurn);
  }
  attention_operations().add_attention_backward(problem, out, lse, grad_out, gradients);
}

AttentionOperations opened(const char* option, const AttentionGpu& gpu, auto* backward) {
  if (!hopper::runs_on(gpu.major, gpu.minor))
    throw DeviceError(
        {option, "a GPU of compute capability 9.0", text_of(gpu.major, ".", gpu.minor), "use --attention own"});
  AttentionOperations operations = attention_operations();
  operations.attention = attention_rows, operations.add_attention_backward = backward;
  return operations;
}

}  // namespace

AttentionOperations open_hopper_attention(const AttentionGpu& gpu) {
  return opened("--attention hopper", gpu, add_attention_rows_backward<true>);
}
AttentionOperations open_hopper_split_attention(const AttentionGpu& gpu) {
  return opened("--attention hopper-split", gpu, add_attention_rows_backward<false>);
}

}  // namespace espalier::cuda
