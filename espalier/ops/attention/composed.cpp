#include "espalier/ops/attention/composed.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <limits>
#include <memory>
#include <mutex>

#include "espalier/device/scalar_type.h"

namespace espalier {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

double scale_of(const AttentionProblem& p) { return p.score_scale(); }

// Rows [n, heads, D].
at::Tensor heads_of(const LibraryAttention& library, const at::Tensor& rows, std::int64_t head_dim) {
  const at::Tensor seen = library.seen(rows);
  return seen.dim() == 3 ? seen : seen.unflatten(1, {seen.size(1) / head_dim, head_dim});
}

struct Operands {
  at::Tensor q, own_k, own_v, path_k, path_v;
};
Operands operands_of(const LibraryAttention& library, const AttentionProblem& p) {
  const auto heads = [&](const at::Tensor& rows) { return heads_of(library, rows, p.head_dim); };
  return {heads(p.q_Q), heads(p.own_k_T), heads(p.own_v_T), heads(p.path_k_P), heads(p.path_v_P)};
}

// All layers of a set of rows come with the same subtree ends, and reading them back waits for the device.
std::shared_ptr<const ComposedCalls> calls_of(const LibraryAttention& library, const at::Tensor& subtree_end_T,
                                              std::int64_t most_rows) {
  struct Kept {
    c10::weak_intrusive_ptr<c10::TensorImpl> ends;
    std::int64_t most_rows;
    std::shared_ptr<const ComposedCalls> calls;
  };
  static std::mutex mutex;
  static std::vector<Kept> all;
  const std::lock_guard lock(mutex);
  std::erase_if(all, [](const Kept& kept) { return kept.ends.expired(); });
  const auto found = std::ranges::find_if(all, [&](const Kept& kept) {
    return kept.ends._unsafe_get_target() == subtree_end_T.unsafeGetTensorImpl() && kept.most_rows == most_rows;
  });
  if (found != all.end()) return found->calls;
  ComposedCalls calls = composed_calls(library.on_host(subtree_end_T), most_rows);
  calls.squares.begin_S1 = library.on_device(calls.squares.begin);
  all.push_back({c10::weak_intrusive_ptr<c10::TensorImpl>(subtree_end_T.getIntrusivePtr()), most_rows,
                 std::make_shared<const ComposedCalls>(std::move(calls))});
  return all.back().calls;
}

// All queries against all keys, in blocks of as many rows a side as the library's backward takes; sums in rows of
// heads.
void add_rectangle_backward(const LibraryAttention& library, const LibraryAttention::Saved& saved, const at::Tensor& q,
                            const at::Tensor& k, const at::Tensor& v, double scale,
                            const LibraryAttention::Gradients& sums) {
  const std::int64_t most = library.backward_rows();
  std::int64_t queries = 0, keys = 0;
  for (std::int64_t query = 0; query < q.size(0); query += queries) {
    queries = std::min(most, q.size(0) - query);
    const auto asking = [&](const at::Tensor& x) { return x.narrow(0, query, queries); };
    const LibraryAttention::Saved of{asking(saved.grad_out), asking(saved.out), saved.lse.narrow(1, query, queries)};
    for (std::int64_t key = 0; key < k.size(0); key += keys) {
      keys = std::min(most, k.size(0) - key);
      const auto seen = [&](const at::Tensor& x) { return x.narrow(0, key, keys); };
      const LibraryAttention::Gradients part = library.rectangle_backward(of, asking(q), seen(k), seen(v), scale);
      asking(sums.q).add_(part.q);
      seen(sums.k).add_(part.k);
      seen(sums.v).add_(part.v);
    }
  }
}

}  // namespace

ComposedCalls composed_calls(std::span<const std::int32_t> subtree_end, std::int64_t most_rows) {
  ComposedCalls calls;
  calls.squares.begin.push_back(0);
  for (const CausalRun& run : causal_runs(subtree_end, most_rows)) {
    calls.squares.begin.push_back(run.end);
    calls.squares.longest = std::max<std::int64_t>(calls.squares.longest, run.end - run.first);
    if (run.below > run.end) calls.rectangles.push_back(run);
  }
  return calls;
}

void LibraryAttention::merge(const Result& first, const Result& second, const at::Tensor& out,
                             const at::Tensor& lse) const {
  const auto seen_lse = [](const Result& of) { return of.lse.masked_fill(of.lse.isinf(), -kInfinity); };
  const at::Tensor first_lse = seen_lse(first), second_lse = seen_lse(second),
                   merged = at::logaddexp(first_lse, second_lse), nothing = merged.isinf();
  const auto part = [&](const Result& of, const at::Tensor& of_lse) {
    const at::Tensor weight = (of_lse - merged).exp().masked_fill(nothing, 0);
    const at::Tensor rows = of.out.to(merged.scalar_type()).masked_fill(of_lse.isinf().t().unsqueeze(-1), 0);
    return rows * weight.t().unsqueeze(-1);
  };
  out.copy_(part(first, first_lse) + part(second, second_lse));
  lse.copy_(merged);
}

bool composes(const LibraryAttention& library, const AttentionProblem& problem, at::ScalarType dtype) {
  return library.takes(dtype) && !problem.query_row_Q.defined() &&
         library.row()
             .reason_against({.head_dim = problem.head_dim,
                              .value_dim = problem.value_dim(),
                              .window = problem.window,
                              .soft_cap = problem.soft_cap})
             .empty();
}

void composed_attention(const LibraryAttention& library, const AttentionProblem& problem, const at::Tensor& out_Q,
                        const at::Tensor& lse_HQ) {
  const auto calls = calls_of(library, problem.subtree_end_T, kAnyRows);
  const auto [q, own_k, own_v, path_k, path_v] = operands_of(library, problem);
  const double scale = scale_of(problem);
  const at::Tensor out = heads_of(library, out_Q, problem.head_dim), lse = library.seen(lse_HQ);
  const LibraryAttention::Result own = library.squares(q, own_k, own_v, calls->squares, scale);
  // Rows that several calls add to are merged in the accumulator dtype and rounded once.
  const bool once = calls->rectangles.empty();
  const at::Tensor merged = once ? out : at::empty(q.sizes(), q.options().dtype(lse.scalar_type()));
  if (path_k.size(0) > 0) {
    library.merge(library.rectangle(q, path_k, path_v, scale), own, merged, lse);
  } else {
    merged.copy_(own.out);
    lse.copy_(own.lse);
  }
  for (const auto& [first, begin, end] : calls->rectangles) {  // keys [first, begin), rows [begin, end)
    const auto keys = [first = first, begin = begin](const at::Tensor& x) { return x.narrow(0, first, begin - first); };
    const at::Tensor rows = merged.narrow(0, begin, end - begin), rows_lse = lse.narrow(1, begin, end - begin);
    library.merge({rows, rows_lse}, library.rectangle(q.narrow(0, begin, end - begin), keys(own_k), keys(own_v), scale),
                  rows, rows_lse);
  }
  if (!once) out.copy_(merged);
}

void add_composed_attention_backward(const LibraryAttention& library, const AttentionProblem& problem,
                                     const at::Tensor& out_Q, const at::Tensor& lse_HQ, const at::Tensor& grad_out_Q,
                                     const AttentionGradients& gradients) {
  const auto calls = calls_of(library, problem.subtree_end_T, library.backward_rows());
  const auto [q, own_k, own_v, path_k, path_v] = operands_of(library, problem);
  const double scale = scale_of(problem);
  const std::int64_t D = problem.head_dim;
  const LibraryAttention::Saved saved{heads_of(library, grad_out_Q, D), heads_of(library, out_Q, D),
                                      library.seen(lse_HQ)};
  const at::Tensor grad_q = at::zeros(q.sizes(), q.options().dtype(saved.lse.scalar_type()));
  if (path_k.size(0) > 0)
    add_rectangle_backward(
        library, saved, q, path_k, path_v, scale,
        {grad_q, heads_of(library, gradients.path_k_P, D), heads_of(library, gradients.path_v_P, D)});
  const at::Tensor sum_k = heads_of(library, gradients.own_k_T, D), sum_v = heads_of(library, gradients.own_v_T, D);
  const LibraryAttention::Gradients own = library.squares_backward(saved, q, own_k, own_v, calls->squares, scale);
  grad_q.add_(own.q);
  sum_k.narrow(0, 0, own.k.size(0)).add_(own.k);
  sum_v.narrow(0, 0, own.v.size(0)).add_(own.v);
  for (const auto& [first, begin, end] : calls->rectangles) {  // keys [first, begin), rows [begin, end)
    const auto asking = [begin = begin, end = end](const at::Tensor& x) { return x.narrow(0, begin, end - begin); };
    const auto keys = [first = first, begin = begin](const at::Tensor& x) { return x.narrow(0, first, begin - first); };
    add_rectangle_backward(library,
                           {asking(saved.grad_out), asking(saved.out), saved.lse.narrow(1, begin, end - begin)},
                           asking(q), keys(own_k), keys(own_v), scale, {asking(grad_q), keys(sum_k), keys(sum_v)});
  }
  heads_of(library, gradients.q_Q, D).copy_(grad_q);
}

}  // namespace espalier
