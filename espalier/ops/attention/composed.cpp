#include "espalier/ops/attention/composed.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/logaddexp.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <limits>
#include <memory>
#include <mutex>
#include <numeric>

#include "espalier/device/scalar_type.h"

namespace espalier {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

std::vector<std::int32_t> all_of(std::span<const std::int32_t> subtree_end) {
  std::vector<std::int32_t> row(subtree_end.size());
  std::iota(row.begin(), row.end(), 0);
  return row;
}

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

// The rows of own keys at which the squares' queries are: all of them as they are, or copies of some.
class SquareRows {
 public:
  SquareRows(const LibraryAttention& library, const AttentionProblem& p)
      : some_(p.query_row_Q.defined() && p.query_row_Q.size(0) < p.own_k_T.size(0)) {
    if (some_) row_Q_ = library.seen(p.query_row_Q);
  }
  at::Tensor of(const at::Tensor& rows_T) const { return some_ ? rows_T.index_select(0, row_Q_) : rows_T; }
  // Rows are distinct, so each number of the sum is added to once, and the bits are the same in every run.
  void add(const at::Tensor& sum_T, const at::Tensor& rows) const {
    if (some_)
      sum_T.index_add_(0, row_Q_, rows.to(sum_T.scalar_type()));
    else
      sum_T.narrow(0, 0, rows.size(0)).add_(rows);
  }

 private:
  bool some_;
  at::Tensor row_Q_;
};

// The calls for a set of rows and its queries, for one limit of rows.
struct KnownCalls {
  ComposedCalls calls;
  bool worth = true;  // worth_calls
  ListsOnDevice lists{};
};

// All layers of a set of rows come with the same tensors, and reading them back waits for the device.
std::shared_ptr<KnownCalls> calls_of(const LibraryAttention& library, const AttentionProblem& p,
                                     std::int64_t most_rows) {
  using Weak = c10::weak_intrusive_ptr<c10::TensorImpl>;
  struct Kept {
    Weak ends, queries;
    bool all_rows;
    std::int64_t most_rows;
    std::shared_ptr<KnownCalls> known;
  };
  static std::mutex mutex;
  static std::vector<Kept> all;
  const std::lock_guard lock(mutex);
  const bool all_rows = !p.query_row_Q.defined();
  const at::Tensor& queries = all_rows ? p.subtree_end_T : p.query_row_Q;
  std::erase_if(all, [](const Kept& kept) { return kept.ends.expired() || kept.queries.expired(); });
  const auto found = std::ranges::find_if(all, [&](const Kept& kept) {
    return kept.ends._unsafe_get_target() == p.subtree_end_T.unsafeGetTensorImpl() &&
           kept.queries._unsafe_get_target() == queries.unsafeGetTensorImpl() && kept.all_rows == all_rows &&
           kept.most_rows == most_rows;
  });
  if (found != all.end()) return found->known;
  const std::vector<std::int32_t> end = library.on_host(p.subtree_end_T);
  const std::vector<std::int32_t> row = all_rows ? all_of(end) : library.on_host(p.query_row_Q);
  KnownCalls known{composed_calls(end, row, most_rows), all_rows || worth_calls(end, row)};
  known.calls.squares.begin_S1 = library.on_device(at::tensor(known.calls.squares.begin, at::kInt));
  all.push_back({Weak(p.subtree_end_T.getIntrusivePtr()), Weak(queries.getIntrusivePtr()), all_rows, most_rows,
                 std::make_shared<KnownCalls>(std::move(known))});
  return all.back().known;
}

// All queries against all keys, in blocks of as many rows a side as the library's backward takes; sums in rows of
// heads.
void add_rectangle_backward(const LibraryAttention& library, const LibraryAttention::Saved& saved, const at::Tensor& q,
                            const at::Tensor& k, const at::Tensor& v, double scale, ListsOnDevice& lists,
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
      const LibraryAttention::Gradients part =
          library.rectangle_backward(of, asking(q), seen(k), seen(v), scale, lists);
      asking(sums.q).add_(part.q);
      seen(sums.k).add_(part.k);
      seen(sums.v).add_(part.v);
    }
  }
}

}  // namespace

ComposedCalls composed_calls(std::span<const std::int32_t> subtree_end, std::span<const std::int32_t> query_row,
                             std::int64_t most_rows) {
  ComposedCalls calls;
  CausalSquares& squares = calls.squares;
  squares.begin.push_back(0);
  const auto first_query = [&](std::int32_t row) {
    return std::int64_t{std::ranges::lower_bound(query_row, row) - query_row.begin()};
  };
  for (const CausalRun& run : causal_runs(subtree_end)) {
    const std::int64_t end = first_query(run.end), below = first_query(run.below);
    std::int64_t rows = 0;
    for (std::int64_t query = first_query(run.first); query < end; query += rows) {
      const std::int32_t row = query_row[static_cast<std::size_t>(query)];
      const auto next = [&] { return query_row[static_cast<std::size_t>(query + rows)]; };
      for (rows = 1; query + rows < end && rows < most_rows && next() == row + rows;) ++rows;
      squares.begin.push_back(static_cast<std::int32_t>(query + rows));
      squares.longest = std::max(squares.longest, rows);
      if (row > run.first) calls.rectangles.push_back({query, rows, run.first, row - run.first});
    }
    if (below > end) calls.rectangles.push_back({end, below - end, run.first, run.end - run.first});
  }
  return calls;
}

bool worth_calls(std::span<const std::int32_t> subtree_end, std::span<const std::int32_t> query_row) {
  if (std::ranges::adjacent_find(query_row) != query_row.end()) return false;
  const ComposedCalls some = composed_calls(subtree_end, query_row),
                      all = composed_calls(subtree_end, all_of(subtree_end));
  const std::size_t squares = some.squares.begin.size(), rectangles = some.rectangles.size();
  return (squares <= all.squares.begin.size() && rectangles <= all.rectangles.size()) ||
         query_row.size() >= kQueriesOfRun * (squares - 1 + rectangles);
}

at::Tensor ListsOnDevice::of(const LibraryAttention& library, const std::vector<std::int64_t>& numbers,
                             at::ScalarType type) {
  at::Tensor& list = lists_[{type, numbers}];
  if (!list.defined()) list = library.on_device(at::tensor(numbers, at::kLong).to(type));
  return list;
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
  const bool taken = library.takes(dtype) && library.row()
                                                 .reason_against({.head_dim = problem.head_dim,
                                                                  .value_dim = problem.value_dim(),
                                                                  .window = problem.window,
                                                                  .soft_cap = problem.soft_cap},
                                                                 library.capability())
                                                 .empty();
  if (!taken || !problem.query_row_Q.defined()) return taken;
  // One query, at the last row of a prompt, is not worth asking the device where it is.
  return problem.queries_in_runs && problem.query_row_Q.size(0) >= kQueriesOfRun &&
         calls_of(library, problem, kAnyRows)->worth;
}

void composed_attention(const LibraryAttention& library, const AttentionProblem& problem, const at::Tensor& out_Q,
                        const at::Tensor& lse_HQ) {
  const auto known = calls_of(library, problem, kAnyRows);
  const ComposedCalls& calls = known->calls;
  const auto [q, own_k, own_v, path_k, path_v] = operands_of(library, problem);
  const double scale = scale_of(problem);
  const at::Tensor out = heads_of(library, out_Q, problem.head_dim), lse = library.seen(lse_HQ);
  const SquareRows rows_of_squares(library, problem);
  const LibraryAttention::Result own =
      library.squares(q, rows_of_squares.of(own_k), rows_of_squares.of(own_v), calls.squares, scale, known->lists);
  // Rows that several calls add to are merged in the accumulator dtype and rounded once.
  const bool once = calls.rectangles.empty();
  const at::Tensor merged = once ? out : at::empty(q.sizes(), q.options().dtype(lse.scalar_type()));
  if (path_k.size(0) > 0) {
    library.merge(library.rectangle(q, path_k, path_v, scale, known->lists), own, merged, lse);
  } else {
    merged.copy_(own.out);
    lse.copy_(own.lse);
  }
  for (const KeyRectangle& each : calls.rectangles) {
    const auto keys = [&](const at::Tensor& x) { return x.narrow(0, each.key, each.keys); };
    const at::Tensor rows = merged.narrow(0, each.query, each.queries),
                     rows_lse = lse.narrow(1, each.query, each.queries);
    library.merge(
        {rows, rows_lse},
        library.rectangle(q.narrow(0, each.query, each.queries), keys(own_k), keys(own_v), scale, known->lists), rows,
        rows_lse);
  }
  if (!once) out.copy_(merged);
}

void add_composed_attention_backward(const LibraryAttention& library, const AttentionProblem& problem,
                                     const at::Tensor& out_Q, const at::Tensor& lse_HQ, const at::Tensor& grad_out_Q,
                                     const AttentionGradients& gradients) {
  const auto known = calls_of(library, problem, library.backward_rows());
  const ComposedCalls& calls = known->calls;
  const auto [q, own_k, own_v, path_k, path_v] = operands_of(library, problem);
  const double scale = scale_of(problem);
  const std::int64_t D = problem.head_dim;
  const LibraryAttention::Saved saved{heads_of(library, grad_out_Q, D), heads_of(library, out_Q, D),
                                      library.seen(lse_HQ)};
  const at::Tensor grad_q = at::zeros(q.sizes(), q.options().dtype(saved.lse.scalar_type()));
  if (path_k.size(0) > 0)
    add_rectangle_backward(
        library, saved, q, path_k, path_v, scale, known->lists,
        {grad_q, heads_of(library, gradients.path_k_P, D), heads_of(library, gradients.path_v_P, D)});
  const at::Tensor sum_k = heads_of(library, gradients.own_k_T, D), sum_v = heads_of(library, gradients.own_v_T, D);
  const SquareRows rows_of_squares(library, problem);
  const LibraryAttention::Gradients own = library.squares_backward(
      saved, q, rows_of_squares.of(own_k), rows_of_squares.of(own_v), calls.squares, scale, known->lists);
  grad_q.add_(own.q);
  rows_of_squares.add(sum_k, own.k);
  rows_of_squares.add(sum_v, own.v);
  for (const KeyRectangle& each : calls.rectangles) {
    const auto asking = [&](const at::Tensor& x) { return x.narrow(0, each.query, each.queries); };
    const auto keys = [&](const at::Tensor& x) { return x.narrow(0, each.key, each.keys); };
    add_rectangle_backward(
        library, {asking(saved.grad_out), asking(saved.out), saved.lse.narrow(1, each.query, each.queries)}, asking(q),
        keys(own_k), keys(own_v), scale, known->lists, {asking(grad_q), keys(sum_k), keys(sum_v)});
  }
  heads_of(library, gradients.q_Q, D).copy_(grad_q);
}

}  // namespace espalier
