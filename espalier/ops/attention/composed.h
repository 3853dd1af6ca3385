// Shared-prefix attention (ops/attention/operations.h) composed of calls of a library's attention: rectangles, in which
// every query sees every key, and causal squares, whose queries are at the rows of their keys. So it makes no
// difference from which corner a library counts the diagonal.
//
//   lse_i = log sum_c exp lse_ic ;  out_i = sum_c exp(lse_ic - lse_i) out_ic     over the calls c of row i
//
// The gradients of a call that is given the merged out and lse are those through its keys (docs/mathematics.md).
//
// Shapes: T rows, P rows of the path, n queries, m keys, H query heads, J key/value heads, D head size.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <map>
#include <span>
#include <utility>
#include <vector>

#include "espalier/ops/attention/operations.h"
#include "espalier/options/attention_kernels.h"
#include "espalier/program/causal_runs.h"

namespace espalier {

// Queries in squares behind each other: square s is queries [begin[s], begin[s + 1]), and its keys are their rows.
struct CausalSquares {
  std::vector<std::int32_t> begin;
  at::Tensor begin_S1;  // the same, int32, where the library reads it
  std::int64_t longest = 0;
};

class LibraryAttention;

// Lists of whole numbers that a library reads on the device, such as offsets of sequences. A list goes there once for
// a set of rows: all layers, and both passes of each, ask for the same ones.
class ListsOnDevice {
 public:
  at::Tensor of(const LibraryAttention& library, const std::vector<std::int64_t>& numbers, at::ScalarType type);

 private:
  std::map<std::pair<at::ScalarType, std::vector<std::int64_t>>, at::Tensor> lists_;
};

// Functions of a library, on one device. Queries [n, H, D], keys and values [m, J, D], in rows at a stride; lse [H, n],
// natural logarithm, in the accumulator dtype. Results are new tensors.
class LibraryAttention {
 public:
  struct Result {
    at::Tensor out, lse;
  };
  struct Saved {
    at::Tensor grad_out, out, lse;  // of the whole attention
  };
  struct Gradients {
    at::Tensor q, k, v;
  };

  virtual ~LibraryAttention() = default;
  virtual const AttentionKernelsRow& row() const = 0;
  virtual int capability() const { return 0; }  // ten times its GPU's; 0: a CPU
  virtual bool takes(at::ScalarType dtype) const { return dtype == at::kBFloat16; }
  // Most rows of a square, and of either side of a rectangle, that a backward is called with.
  virtual std::int64_t backward_rows() const { return kAnyRows; }
  // A tensor of the device as the library sees it: the same memory.
  virtual at::Tensor seen(const at::Tensor& tensor) const = 0;
  virtual std::vector<std::int32_t> on_host(const at::Tensor& whole_numbers) const = 0;
  virtual at::Tensor on_device(const at::Tensor& whole_numbers) const = 0;

  // Two calls of the same rows as one: out [n, H, D] in the heads' dtype or the accumulator dtype, lse [H, n]; both are
  // overwritten and may be the first call's. A row that saw no keys in a call has lse +inf there, as FlashAttention-2
  // writes it, or -inf, and the call adds nothing to it. Here with ATen's operations, element by element.
  virtual void merge(const Result& first, const Result& second, const at::Tensor& out, const at::Tensor& lse) const;

  // `lists` belong to the call's set of rows.
  virtual Result rectangle(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, double scale,
                           ListsOnDevice& lists) const = 0;
  virtual Result squares(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const CausalSquares& squares,
                         double scale, ListsOnDevice& lists) const = 0;
  virtual Gradients rectangle_backward(const Saved& saved, const at::Tensor& q, const at::Tensor& k,
                                       const at::Tensor& v, double scale, ListsOnDevice& lists) const = 0;
  virtual Gradients squares_backward(const Saved& saved, const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                                     const CausalSquares& squares, double scale, ListsOnDevice& lists) const = 0;
};

// Queries [query, query + queries) all see own keys [key, key + keys).
struct KeyRectangle {
  std::int64_t query, queries, key, keys;
};

// The calls for queries at these own rows (ascending), whose subtrees end at subtree_end (program/causal_runs.h). A
// square is a run of queries at neighbouring rows of one branch, at most `most_rows` of them.
struct ComposedCalls {
  CausalSquares squares;
  std::vector<KeyRectangle> rectangles;
};
ComposedCalls composed_calls(std::span<const std::int32_t> subtree_end, std::span<const std::int32_t> query_row,
                             std::int64_t most_rows = kAnyRows);

// A library's tile has as many queries, or twice as many. Shorter runs leave it partly empty.
inline constexpr std::int64_t kQueriesOfRun = 64;

// True if queries at these rows are worth a library's calls: no more calls than queries at all rows take, or at least
// kQueriesOfRun queries a call. False where a row has several queries: sums of its gradients would have no fixed order.
bool worth_calls(std::span<const std::int32_t> subtree_end, std::span<const std::int32_t> query_row);

// True if the problem can be composed: a dtype that the library takes, no reason in its row against these heads, and
// queries at all rows or in runs that are worth its calls.
bool composes(const LibraryAttention& library, const AttentionProblem& problem, at::ScalarType dtype);

// The contract of AttentionOperations, for queries at distinct rows. The calls are worked out once for a problem's
// subtree_end_T and query_row_Q, and kept while these tensors live.
void composed_attention(const LibraryAttention& library, const AttentionProblem& problem, const at::Tensor& out_Q,
                        const at::Tensor& lse_HQ);
void add_composed_attention_backward(const LibraryAttention& library, const AttentionProblem& problem,
                                     const at::Tensor& out_Q, const at::Tensor& lse_HQ, const at::Tensor& grad_out_Q,
                                     const AttentionGradients& gradients);

}  // namespace espalier
