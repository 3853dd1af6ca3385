// A block of logits: the log-probs and entropies of its rows' edges, and in place the gradient of the logits. raw is a
// logit of the block, before the temperature.
//
// A distribution d is the softmax of a row b over a set S_d of tokens: the whole vocabulary, or the tokens that a
// sampler kept. Its edges are tokens drawn from it.
//
//   z_dv = raw_bv / temperature_d;  lse_d = log sum_{v in S_d} exp z_dv;  p_dv = exp(z_dv - lse_d) in S_d, 0 outside
//   logprob_e = z_{d(e), target(e)} - lse_{d(e)};  entropy_d = lse_d - sum_{v in S_d} p_dv z_dv
//   d raw_bv = sum_{d of b} (sum_{e of d} g_e (1[v = target_e] - p_dv) - h_d p_dv (log p_dv + entropy_d)) /
//   temperature_d
// with g_e = dL/dlogprob_e and h_d the sum of dL/dentropy over the distribution's edges; the last term is 0 outside
// S_d. Logits of any size cause no overflow.
//
// Shapes: B rows, V columns of logits, D distributions, E edges, both ordered by row. The columns are the tokens
// [first, first + V): the whole vocabulary, or one rank's part of it. In the latter case ranks exchange the
// distributions' maxima and sums, and the raw logit of each edge, which one of them has; they never exchange blocks of
// logits. Logits are float32 or float64; other numbers are float64. The value head of a critic is below.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

namespace espalier {

// Logits from the head's product: z = scale raw, then cap tanh(z / cap); cap 0: no cap.
struct LogitShape {
  double scale = 1, cap = 0;

  bool is_plain() const { return scale == 1 && cap == 0; }
};

// The distributions of a block's rows, if some are over kept sets. All int32.
struct KeptBlock {
  at::Tensor row_D;           // the row, counted from the block's first
  at::Tensor begin_D, end_D;  // columns [begin_d, end_d) of `column`, ascending; end -1: all columns
  at::Tensor column_Z;
  at::Tensor first_B1;  // row b has the distributions [first_b, first_{b + 1}); at most the first is over all columns

  bool defined() const { return row_D.defined(); }
};

struct EdgeBlock {
  at::Tensor temperature_D;  // float64; the same for all distributions of a row
  at::Tensor begin_D1;       // int32: edges [begin_d - begin_0, begin_{d + 1} - begin_0) of `target` are drawn from d
  at::Tensor target_E;       // int32
  LogitShape shape = {};     // already applied to the logits; logit_gradients goes back through it
  KeptBlock kept = {};       // undefined: row d has the one distribution d, over the whole vocabulary
};

// With y = (raw - max) / temperature. After score_edges the two sums hold log_sum and entropy instead.
struct LogitSums {
  at::Tensor max_D;                  // max_v raw_v; -inf if no token of the set is among the columns
  at::Tensor sum_exp_D, weighted_D;  // sum_v exp y_v, sum_v y_v exp y_v
};

struct HeadOperations {
  // Applies the shape in place.
  void (*shape_logits)(const LogitShape& shape, const at::Tensor& logits_BV);
  // Overwrites sums with these columns' sums, and raw with each target's logit, or 0 if another rank has its column.
  void (*logit_sums)(const EdgeBlock& edges, std::int64_t first, const at::Tensor& logits_BV, const LogitSums& sums,
                     const at::Tensor& raw_E);
  // Rescales the sums to max_D, a maximum at least as large, which becomes sums.max.
  void (*raise_maximum)(const EdgeBlock& edges, const at::Tensor& max_D, const LogitSums& sums);
  // From the sums and raw logits of all columns: overwrites logprob and entropy, and sums with (log_sum, entropy).
  void (*score_edges)(const EdgeBlock& edges, const at::Tensor& raw_E, const LogitSums& sums,
                      const at::Tensor& logprob_E, const at::Tensor& entropy_E);
  // Overwrites the logits with the gradient of the logits before `shape`. `sums`: after score_edges.
  void (*logit_gradients)(const EdgeBlock& edges, std::int64_t first, const LogitSums& sums,
                          const at::Tensor& grad_logprob_E, const at::Tensor& grad_entropy_E,
                          const at::Tensor& logits_BV);

  // value_o = hidden_o . weight + bias. Overwrites value (float64). O rows, M width.
  void (*value)(const at::Tensor& hidden_OM, const at::Tensor& weight_M, const at::Tensor& bias_1,
                const at::Tensor& value_O);
  // grad_hidden_o = g_o weight; grad_weight += sum_o g_o hidden_o; grad_bias += sum_o g_o. Overwrites grad_hidden, adds
  // to the others (accumulator dtype). Sums are in float64.
  void (*add_value_backward)(const at::Tensor& hidden_OM, const at::Tensor& weight_M, const at::Tensor& grad_value_O,
                             const at::Tensor& grad_hidden_OM, const at::Tensor& grad_weight_M,
                             const at::Tensor& grad_bias_1);
};

}  // namespace espalier
