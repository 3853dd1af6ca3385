// Common to the attention libraries on a GPU (ops/attention/composed.h): ATen's tensors and stream.
#pragma once

#include "espalier/base/error.h"
#include "espalier/ops/attention/composed.h"
#include "espalier/ops/cuda/aten.h"
#include "espalier/ops/cuda/operations.h"

namespace espalier::cuda {

class AtenLibrary : public LibraryAttention {
 public:
  at::Tensor seen(const at::Tensor& tensor) const override;
  std::vector<std::int32_t> on_host(const at::Tensor& whole_numbers) const override;
  at::Tensor on_device(const at::Tensor& whole_numbers) const override;
  void merge(const Result& first, const Result& second, const at::Tensor& out, const at::Tensor& lse) const override;
};

// Attention on GPU `index` composed of the library's calls if it takes the problem, else the kernels of
// attention_operations(). `option` names it in errors; `open()` returns the library, which stays open for the process.
// Errors: DeviceError if this torch has no CUDA.
template <class Open>
AttentionOperations composed_operations(const char* option, int index, const Open& open) {
  if (const std::string& problem = open_aten(index); !problem.empty())
    throw DeviceError({option, "a torch with CUDA, libtorch_cuda.so", problem, "use --attention own"});
  static decltype(open()) library;
  library = open();
  AttentionOperations all = attention_operations();
  all.attention = [](const AttentionProblem& problem, const at::Tensor& out, const at::Tensor& lse) {
    if (!composes(*library, problem, out.scalar_type())) return attention_operations().attention(problem, out, lse);
    const OnOurStream on_our_stream;
    composed_attention(*library, problem, out, lse);
  };
  all.add_attention_backward = [](const AttentionProblem& problem, const at::Tensor& out, const at::Tensor& lse,
                                  const at::Tensor& grad_out, const AttentionGradients& gradients) {
    if (!composes(*library, problem, out.scalar_type()))
      return attention_operations().add_attention_backward(problem, out, lse, grad_out, gradients);
    const OnOurStream on_our_stream;
    add_composed_attention_backward(*library, problem, out, lse, grad_out, gradients);
  };
  return all;
}

}  // namespace espalier::cuda
