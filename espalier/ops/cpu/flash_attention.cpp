// ATen's FlashAttention of processors as the calls that attention is composed of (ops/attention/composed.h).
#include <ATen/core/Tensor.h>
#include <ATen/ops/_scaled_dot_product_flash_attention_for_cpu.h>
#include <ATen/ops/_scaled_dot_product_flash_attention_for_cpu_backward.h>
#include <ATen/ops/concat.h>
#include <ATen/ops/tensor.h>

#include "espalier/device/host_values.h"
#include "espalier/ops/attention/composed.h"
#include "espalier/ops/cpu/operations.h"

namespace espalier::cpu {
namespace {

// Rows [n, heads, D] as ATen has them, [1, heads, n, D], and back.
at::Tensor in(const at::Tensor& rows) { return rows.transpose(0, 1).unsqueeze(0); }
at::Tensor back(const at::Tensor& x) { return x.squeeze(0).transpose(0, 1); }

class CpuFlash final : public LibraryAttention {
 public:
  const AttentionKernelsRow& row() const override {
    static constexpr AttentionKernelsRow kAnyHeads{.composed = true};
    return kAnyHeads;
  }
  bool takes(at::ScalarType) const override { return true; }
  at::Tensor seen(const at::Tensor& tensor) const override { return tensor; }
  std::vector<std::int32_t> on_host(const at::Tensor& whole_numbers) const override {
    const auto values = host_values<std::int32_t>(whole_numbers);
    return {values.begin(), values.end()};
  }
  at::Tensor on_device(const at::Tensor& whole_numbers) const override { return whole_numbers; }

  Result rectangle(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, double scale,
                   ListsOnDevice&) const override {
    return forward(q, k, v, false, scale);
  }
  Result squares(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const CausalSquares& squares,
                 double scale, ListsOnDevice&) const override {
    std::vector<at::Tensor> out, lse;
    for_each(squares, [&](std::int64_t begin, std::int64_t rows) {
      Result one = forward(q.narrow(0, begin, rows), k.narrow(0, begin, rows), v.narrow(0, begin, rows), true, scale);
      out.push_back(std::move(one.out));
      lse.push_back(std::move(one.lse));
    });
    return {at::concat(out), at::concat(lse, 1)};
  }
  Gradients rectangle_backward(const Saved& saved, const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                               double scale, ListsOnDevice&) const override {
    return backward(saved, q, k, v, false, scale);
  }
  Gradients squares_backward(const Saved& saved, const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                             const CausalSquares& squares, double scale, ListsOnDevice&) const override {
    std::vector<at::Tensor> grad_q, grad_k, grad_v;
    for_each(squares, [&](std::int64_t begin, std::int64_t rows) {
      const auto part = [&](const at::Tensor& x) { return x.narrow(0, begin, rows); };
      Gradients one = backward({part(saved.grad_out), part(saved.out), saved.lse.narrow(1, begin, rows)}, part(q),
                               part(k), part(v), true, scale);
      grad_q.push_back(std::move(one.q));
      grad_k.push_back(std::move(one.k));
      grad_v.push_back(std::move(one.v));
    });
    return {at::concat(grad_q), at::concat(grad_k), at::concat(grad_v)};
  }

 private:
  static void for_each(const CausalSquares& squares, auto&& visit) {
    for (std::size_t s = 0; s + 1 < squares.begin.size(); ++s)
      visit(std::int64_t{squares.begin[s]}, std::int64_t{squares.begin[s + 1] - squares.begin[s]});
  }
  static Result forward(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, bool causal, double scale) {
    const auto [out, lse] =
        at::_scaled_dot_product_flash_attention_for_cpu(in(q), in(k), in(v), 0.0, causal, {}, scale);
    return {back(out), lse.squeeze(0)};
  }
  // The kernel reads lse as a transposed view of [1, n, H].
  static Gradients backward(const Saved& saved, const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                            bool causal, double scale) {
    const auto [grad_q, grad_k, grad_v] = at::_scaled_dot_product_flash_attention_for_cpu_backward(
        in(saved.grad_out), in(q), in(k), in(v), in(saved.out), saved.lse.t().contiguous().t().unsqueeze(0), 0.0,
        causal, {}, scale);
    return {back(grad_q), back(grad_k), back(grad_v)};
  }
};

const CpuFlash& kernels() {
  static const CpuFlash one;
  return one;
}

void attention(const AttentionProblem& problem, const at::Tensor& out, const at::Tensor& lse) {
  if (!composes(kernels(), problem, out.scalar_type())) return attention_operations().attention(problem, out, lse);
  composed_attention(kernels(), problem, out, lse);
}

void add_attention_backward(const AttentionProblem& problem, const at::Tensor& out, const at::Tensor& lse,
                            const at::Tensor& grad_out, const AttentionGradients& gradients) {
  if (!composes(kernels(), problem, out.scalar_type()))
    return attention_operations().add_attention_backward(problem, out, lse, grad_out, gradients);
  add_composed_attention_backward(kernels(), problem, out, lse, grad_out, gradients);
}

}  // namespace

AttentionOperations flash_attention_operations() {
  AttentionOperations all = attention_operations();
  all.attention = attention;
  all.add_attention_backward = add_attention_backward;
  return all;
}

}  // namespace espalier::cpu
