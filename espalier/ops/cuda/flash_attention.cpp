// FlashAttention-2 of ATen as the calls that attention is composed of (ops/composed/attention.h).
#include "espalier/ops/cuda/flash_attention.h"

#include <ATen/ATen.h>

#include "espalier/base/error.h"
#include "espalier/ops/cuda/aten_library.h"

namespace espalier::cuda {
namespace {

bool in_one_order = true;

// Whether the gradient of queries is summed in one order, at the price of memory.
class Deterministic {
 public:
  Deterministic() : before_(at::globalContext().deterministicAlgorithms()) {
    at::globalContext().setDeterministicAlgorithms(in_one_order, at::globalContext().deterministicAlgorithmsWarnOnly());
  }
  ~Deterministic() {
    at::globalContext().setDeterministicAlgorithms(before_, at::globalContext().deterministicAlgorithmsWarnOnly());
  }
  Deterministic(const Deterministic&) = delete;
  Deterministic& operator=(const Deterministic&) = delete;

 private:
  bool before_;
};

class Flash2 final : public AtenLibrary {
 public:
  bool takes(at::ScalarType dtype, std::int64_t head_dim) const override {
    return dtype == at::kBFloat16 && head_dim % 8 == 0 && head_dim <= 256;
  }

  Result rectangle(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, double scale) const override {
    const auto [out, lse, seed, offset, mask] = at::_flash_attention_forward(
        q.unsqueeze(0), k.unsqueeze(0), v.unsqueeze(0), {}, {}, q.size(0), k.size(0), 0.0, false, false, scale);
    return {out.squeeze(0), lse.squeeze(0)};
  }
  Result squares(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const CausalSquares& squares,
                 double scale) const override {
    const auto [out, lse, seed, offset, mask] = at::_flash_attention_forward(
        q, k, v, squares.begin_S1, squares.begin_S1, squares.longest, squares.longest, 0.0, true, false, scale);
    return {out, lse};
  }
  Gradients rectangle_backward(const Saved& saved, const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                               double scale) const override {
    const Deterministic deterministic;
    const auto one = [](const at::Tensor& x) { return x.unsqueeze(0); };
    const at::Tensor unused = no_dropout(q);
    const auto [grad_q, grad_k, grad_v] = at::_flash_attention_backward(
        one(saved.grad_out), one(q), one(k), one(v), one(saved.out), one(saved.lse.contiguous()), {}, {}, q.size(0),
        k.size(0), 0.0, false, unused, unused, scale);
    return {grad_q.squeeze(0), grad_k.squeeze(0), grad_v.squeeze(0)};
  }
  Gradients squares_backward(const Saved& saved, const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                             const CausalSquares& squares, double scale) const override {
    const Deterministic deterministic;
    const at::Tensor unused = no_dropout(q);
    const auto [grad_q, grad_k, grad_v] = at::_flash_attention_backward(
        saved.grad_out, q, k, v, saved.out, saved.lse.contiguous(), squares.begin_S1, squares.begin_S1, squares.longest,
        squares.longest, 0.0, true, unused, unused, scale);
    return {grad_q, grad_k, grad_v};
  }

 private:
  static at::Tensor no_dropout(const at::Tensor& like) { return at::empty({2}, like.options().dtype(at::kLong)); }
};

const AtenLibrary& library() {
  static const Flash2 one;
  return one;
}

}  // namespace

AttentionOperations open_flash_attention(int index, bool deterministic) {
  if (const std::string& problem = open_aten(index); !problem.empty())
    throw DeviceError({"--attention flash", "a torch with CUDA, libtorch_cuda.so", problem, "use --attention own"});
  in_one_order = deterministic;
  return composed_operations<library>();
}

}  // namespace espalier::cuda
