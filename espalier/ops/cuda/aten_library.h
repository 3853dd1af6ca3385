// Common to the attention libraries on a GPU (ops/composed/attention.h): ATen's tensors and stream.
#pragma once

#include "espalier/ops/composed/attention.h"
#include "espalier/ops/cuda/aten.h"
#include "espalier/ops/cuda/operations.h"

namespace espalier::cuda {

class AtenLibrary : public LibraryAttention {
 public:
  at::Tensor seen(const at::Tensor& tensor) const override;
  std::vector<std::int32_t> on_host(const at::Tensor& whole_numbers) const override;
  at::Tensor on_device(const std::vector<std::int32_t>& whole_numbers) const override;
  void merge(const Result& first, const Result& second, const at::Tensor& out, const at::Tensor& lse) const override;
};

// Attention composed of the library's calls if it takes the problem, else the kernels of attention_operations().
template <const AtenLibrary& (*library)()>
AttentionOperations composed_operations() {
  AttentionOperations all = attention_operations();
  all.attention = [](const AttentionProblem& problem, const at::Tensor& out, const at::Tensor& lse) {
    if (!composes(library(), problem, out.scalar_type())) return attention_operations().attention(problem, out, lse);
    const OnOurStream on_our_stream;
    composed_attention(library(), problem, out, lse);
  };
  all.add_attention_backward = [](const AttentionProblem& problem, const at::Tensor& out, const at::Tensor& lse,
                                  const at::Tensor& grad_out, const AttentionGradients& gradients) {
    if (!composes(library(), problem, out.scalar_type()))
      return attention_operations().add_attention_backward(problem, out, lse, grad_out, gradients);
    const OnOurStream on_our_stream;
    add_composed_attention_backward(library(), problem, out, lse, grad_out, gradients);
  };
  return all;
}

}  // namespace espalier::cuda
