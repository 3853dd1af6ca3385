#include "espalier/ops/flash/composed.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <memory>
#include <mutex>

#include "espalier/device/scalar_type.h"

namespace espalier {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

double scale_of(const AttentionProblem& p) { return 1.0 / std::sqrt(static_cast<double>(p.head_dim)); }

// Rows [n, heads, D].
at::Tensor heads_of(const FlashKernels& kernels, const at::Tensor& rows, std::int64_t head_dim) {
  const at::Tensor seen = kernels.seen(rows);
  return seen.dim() == 3 ? seen : seen.unflatten(1, {seen.size(1) / head_dim, head_dim});
}

struct Operands {
  at::Tensor q, own_k, own_v, path_k, path_v;
};
Operands operands_of(const FlashKernels& kernels, const AttentionProblem& p) {
  const auto heads = [&](const at::Tensor& rows) { return heads_of(kernels, rows, p.head_dim); };
  return {heads(p.q_Q), heads(p.own_k_T), heads(p.own_v_T), heads(p.path_k_P), heads(p.path_v_P)};
}

// All layers of a set of rows come with the same subtree ends, and reading them back waits for the device.
std::shared_ptr<const FlashCalls> calls_of(const FlashKernels& kernels, const at::Tensor& subtree_end_T) {
  struct Kept {
    c10::weak_intrusive_ptr<c10::TensorImpl> ends;
    std::shared_ptr<const FlashCalls> calls;
  };
  static std::mutex mutex;
  static std::vector<Kept> all;
  const std::lock_guard lock(mutex);
  std::erase_if(all, [](const Kept& kept) { return kept.ends.expired(); });
  const auto found = std::ranges::find_if(
      all, [&](const Kept& kept) { return kept.ends._unsafe_get_target() == subtree_end_T.unsafeGetTensorImpl(); });
  if (found != all.end()) return found->calls;
  FlashCalls calls = flash_calls(kernels.on_host(subtree_end_T));
  calls.squares.begin_S1 = kernels.on_device(calls.squares.begin);
  all.push_back({c10::weak_intrusive_ptr<c10::TensorImpl>(subtree_end_T.getIntrusivePtr()),
                 std::make_shared<const FlashCalls>(std::move(calls))});
  return all.back().calls;
}

// Gradients of keys or values, rows [begin, begin + n) of them.
void add_to_rows(const FlashKernels& kernels, const at::Tensor& sum, std::int64_t head_dim, std::int64_t begin,
                 const at::Tensor& part) {
  heads_of(kernels, sum, head_dim).narrow(0, begin, part.size(0)).add_(part);
}

}  // namespace

FlashCalls flash_calls(const std::vector<std::int32_t>& subtree_end) {
  FlashCalls calls;
  const auto rows = static_cast<std::int64_t>(subtree_end.size());
  const auto end_of = [&](std::int64_t row) { return std::int64_t{subtree_end[static_cast<std::size_t>(row)]}; };
  calls.squares.begin.push_back(0);
  for (std::int64_t first = 0, begin = 0; first < rows; first = begin) {
    // Neighbours with the same end follow each other on one branch: each sees those before it.
    while (begin < rows && end_of(begin) == end_of(first)) ++begin;
    calls.squares.begin.push_back(static_cast<std::int32_t>(begin));
    calls.squares.longest = std::max(calls.squares.longest, begin - first);
    if (end_of(first) > begin) calls.rectangles.push_back({first, begin, end_of(first)});
  }
  return calls;
}

void merge_result(const FlashKernels::Result& result, const at::Tensor& out, const at::Tensor& lse) {
  const at::Tensor empty = result.lse.isinf();
  const at::Tensor added = result.lse.masked_fill(empty, -kInfinity), merged = at::logaddexp(lse, added);
  const at::Tensor nothing = merged.isinf();
  const auto weight = [&](const at::Tensor& of) {
    return (of - merged).exp().masked_fill(nothing, 0).t().unsqueeze(-1);
  };
  const at::Tensor part = result.out.to(out.scalar_type()).masked_fill(empty.t().unsqueeze(-1), 0);
  out.mul_(weight(lse)).add_(part * weight(added));
  lse.copy_(merged);
}

bool composes(const FlashKernels& kernels, const AttentionProblem& problem, at::ScalarType dtype) {
  return kernels.takes(dtype, problem.head_dim) && !problem.query_row_Q.defined();
}

void composed_attention(const FlashKernels& kernels, const AttentionProblem& problem, const at::Tensor& out_Q,
                        const at::Tensor& lse_HQ) {
  const auto calls = calls_of(kernels, problem.subtree_end_T);
  const auto [q, own_k, own_v, path_k, path_v] = operands_of(kernels, problem);
  const double scale = scale_of(problem);
  const at::Tensor lse = kernels.seen(lse_HQ);
  const at::Tensor merged = at::zeros(q.sizes(), q.options().dtype(lse.scalar_type()));
  lse.fill_(-kInfinity);
  if (path_k.size(0) > 0) merge_result(kernels.rectangle(q, path_k, path_v, scale), merged, lse);
  merge_result(kernels.squares(q, own_k, own_v, calls->squares, scale), merged, lse);
  for (const auto& [first, begin, end] : calls->rectangles) {
    const auto keys = [first = first, begin = begin](const at::Tensor& x) { return x.narrow(0, first, begin - first); };
    merge_result(kernels.rectangle(q.narrow(0, begin, end - begin), keys(own_k), keys(own_v), scale),
                 merged.narrow(0, begin, end - begin), lse.narrow(1, begin, end - begin));
  }
  heads_of(kernels, out_Q, problem.head_dim).copy_(merged);
}

void add_composed_attention_backward(const FlashKernels& kernels, const AttentionProblem& problem,
                                     const at::Tensor& out_Q, const at::Tensor& lse_HQ, const at::Tensor& grad_out_Q,
                                     const AttentionGradients& gradients) {
  const auto calls = calls_of(kernels, problem.subtree_end_T);
  const auto [q, own_k, own_v, path_k, path_v] = operands_of(kernels, problem);
  const double scale = scale_of(problem);
  const std::int64_t D = problem.head_dim;
  const FlashKernels::Saved saved{heads_of(kernels, grad_out_Q, D), heads_of(kernels, out_Q, D), kernels.seen(lse_HQ)};
  const at::Tensor grad_q = at::zeros(q.sizes(), q.options().dtype(saved.lse.scalar_type()));
  if (path_k.size(0) > 0) {
    const FlashKernels::Gradients part = kernels.rectangle_backward(saved, q, path_k, path_v, scale);
    grad_q.add_(part.q);
    add_to_rows(kernels, gradients.path_k_P, D, 0, part.k);
    add_to_rows(kernels, gradients.path_v_P, D, 0, part.v);
  }
  const FlashKernels::Gradients own = kernels.squares_backward(saved, q, own_k, own_v, calls->squares, scale);
  grad_q.add_(own.q);
  add_to_rows(kernels, gradients.own_k_T, D, 0, own.k);
  add_to_rows(kernels, gradients.own_v_T, D, 0, own.v);
  for (const auto& [first, begin, end] : calls->rectangles) {
    const std::int64_t queries = end - begin, keys = begin - first;
    const FlashKernels::Saved of{saved.grad_out.narrow(0, begin, queries), saved.out.narrow(0, begin, queries),
                                 saved.lse.narrow(1, begin, queries)};
    const FlashKernels::Gradients part = kernels.rectangle_backward(
        of, q.narrow(0, begin, queries), own_k.narrow(0, first, keys), own_v.narrow(0, first, keys), scale);
    grad_q.narrow(0, begin, queries).add_(part.q);
    add_to_rows(kernels, gradients.own_k_T, D, first, part.k);
    add_to_rows(kernels, gradients.own_v_T, D, first, part.v);
  }
  heads_of(kernels, gradients.q_Q, D).copy_(grad_q);
}

}  // namespace espalier
