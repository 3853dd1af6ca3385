// Shared-prefix attention on tensors. Equations and visibility: ops/attention/rows.h.
//
// Shapes: Q query rows, T own rows, P rows of the path, H query heads, J key/value heads, D size of a query and key
// head, Dv of a value head (given by v's columns). Rows may have a stride; the other one or two dimensions are
// contiguous. lse and the gradients of keys and values are in the accumulator dtype.
#pragma once

#include <ATen/core/Tensor.h>

#include <cmath>

namespace espalier {

struct AttentionProblem {
  std::int64_t head_dim;             // D
  at::Tensor q_Q, own_k_T, own_v_T;  // [Q, H D], [T, J D], [T, J Dv]
  at::Tensor path_k_P, path_v_P;     // [P, J D], [P, J Dv]
  at::Tensor query_row_Q;            // int32, own row of each query, ascending; undefined: query i is own row i
  at::Tensor subtree_end_T;          // int32: query at own row i sees own row j iff j <= i < subtree_end[j]
  std::int64_t window = 0;           // a row sees only rows less than this far above it; 0: all
  at::Tensor depth_T = {};           // int32, of each own row; path row j has depth j. Read if there is a window
  double scale = 0;                  // of scores; 0: 1/sqrt(D)
  double soft_cap = 0;               // scores become cap tanh(score / cap); 0: no cap
  bool queries_in_runs = false;      // chosen queries may be at long runs of rows, which a library takes

  std::int64_t kv_heads() const { return columns_of(own_k_T) / head_dim; }
  std::int64_t value_dim() const { return columns_of(own_v_T) / kv_heads(); }  // Dv
  double score_scale() const { return scale != 0 ? scale : 1 / std::sqrt(static_cast<double>(head_dim)); }

  static std::int64_t columns_of(const at::Tensor& rows) {
    return rows.dim() == 3 ? rows.size(1) * rows.size(2) : rows.size(1);
  }
};

struct AttentionGradients {
  at::Tensor q_Q;                 // overwritten
  at::Tensor own_k_T, own_v_T;    // added to
  at::Tensor path_k_P, path_v_P;  // added to
};

struct AttentionOperations {
  // Overwrites out [Q, H Dv] and lse [H, Q] (natural logarithm).
  void (*attention)(const AttentionProblem& problem, const at::Tensor& out_Q, const at::Tensor& lse_HQ);
  // Takes the results of `attention`. Overwrites the gradient of q, adds to the others.
  void (*add_attention_backward)(const AttentionProblem& problem, const at::Tensor& out_Q, const at::Tensor& lse_HQ,
                                 const at::Tensor& grad_out_Q, const AttentionGradients& gradients);
  // Sinks: one more logit per head in the softmax of each row, without a value. lse' = log(exp lse + exp sink), out' =
  // out exp(lse - lse'), in place. With out' and lse', add_attention_backward gives the gradients under the sinks.
  void (*join_sinks)(const at::Tensor& sink_H, const at::Tensor& out_Q, const at::Tensor& lse_HQ);
  // grad_sink_h -= sum_q exp(sink_h - lse'_hq) (grad_out_q . out'_q)_h, in the accumulator dtype.
  void (*add_sinks_backward)(const at::Tensor& sink_H, const at::Tensor& out_Q, const at::Tensor& lse_HQ,
                             const at::Tensor& grad_out_Q, const at::Tensor& grad_sink_H);
  // True if a library sums gradients of queries in one order without a number for each pair of rows.
  bool adds_in_turn = false;
};

}  // namespace espalier
