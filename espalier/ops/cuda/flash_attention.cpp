// FlashAttention-2 of ATen as the calls that attention is composed of (ops/attention/composed.h).
#include <ATen/Context.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/_flash_attention_backward.h>
#include <ATen/ops/_flash_attention_forward.h>
#include <ATen/ops/empty.h>

#include <memory>

#include "espalier/ops/cuda/aten_library.h"
#include "espalier/ops/cuda/open_attention.h"

namespace espalier::cuda {
namespace {

// While it lives, ATen sums the gradient of queries in one order, at the price of memory, or in any order.
class Deterministic {
 public:
  explicit Deterministic(bool in_one_order) : before_(at::globalContext().deterministicAlgorithms()) {
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
  explicit Flash2(bool deterministic) : deterministic_(deterministic) {}

  const AttentionKernelsRow& row() const override { return row_of(AttentionKernels::flash); }

  Result rectangle(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, double scale,
                   ListsOnDevice&) const override {
    const auto [out, lse, seed, offset, mask] = at::_flash_attention_forward(
        q.unsqueeze(0), k.unsqueeze(0), v.unsqueeze(0), {}, {}, q.size(0), k.size(0), 0.0, false, false, scale);
    return {out.squeeze(0), lse.squeeze(0)};
  }
  Result squares(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const CausalSquares& squares,
                 double scale, ListsOnDevice&) const override {
    const auto [out, lse, seed, offset, mask] = at::_flash_attention_forward(
        q, k, v, squares.begin_S1, squares.begin_S1, squares.longest, squares.longest, 0.0, true, false, scale);
    return {out, lse};
  }
  Gradients rectangle_backward(const Saved& saved, const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                               double scale, ListsOnDevice&) const override {
    const Deterministic order(deterministic_);
    const auto one = [](const at::Tensor& x) { return x.unsqueeze(0); };
    const at::Tensor unused = no_dropout(q);
    const auto [grad_q, grad_k, grad_v] = at::_flash_attention_backward(
        one(saved.grad_out), one(q), one(k), one(v), one(saved.out), one(saved.lse.contiguous()), {}, {}, q.size(0),
        k.size(0), 0.0, false, unused, unused, scale);
    return {grad_q.squeeze(0), grad_k.squeeze(0), grad_v.squeeze(0)};
  }
  Gradients squares_backward(const Saved& saved, const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                             const CausalSquares& squares, double scale, ListsOnDevice&) const override {
    const Deterministic order(deterministic_);
    const at::Tensor unused = no_dropout(q);
    const auto [grad_q, grad_k, grad_v] = at::_flash_attention_backward(
        saved.grad_out, q, k, v, saved.out, saved.lse.contiguous(), squares.begin_S1, squares.begin_S1, squares.longest,
        squares.longest, 0.0, true, unused, unused, scale);
    return {grad_q, grad_k, grad_v};
  }

 private:
  static at::Tensor no_dropout(const at::Tensor& like) { return at::empty({2}, like.options().dtype(at::kLong)); }

  bool deterministic_;
};

}  // namespace

AttentionOperations open_flash_attention(const AttentionGpu& gpu) {
  return composed_operations("--attention flash", gpu.index,
                             [&] { return std::make_unique<const Flash2>(gpu.deterministic); });
}

}  // namespace espalier::cuda
