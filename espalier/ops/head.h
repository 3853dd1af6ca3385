// A block of logits: the log-probs and entropies of its rows' edges, and in place the gradient of the logits. raw is a
// logit of the block, before the temperature.
//
//   z_bv = raw_bv / temperature_b;  lse_b = log sum_v exp z_bv
//   logprob_e = z_{b(e), target(e)} - lse_{b(e)};  entropy_b = lse_b - sum_v p_bv z_bv
//   d raw_bv = (sum_{e of b} g_e (1[v = target_e] - p_bv) - h_b p_bv (log p_bv + entropy_b)) / temperature_b
// with g_e = dL/dlogprob_e and h_b the sum of dL/dentropy over the row's edges. Logits of any size cause no overflow.
//
// Shapes: B rows, V columns of logits, E edges of these rows, ordered by row. The columns are the tokens
// [first, first + V): the whole vocabulary, or one rank's part of it. In the latter case ranks exchange the rows'
// maxima and sums, and the raw logit of each edge, which one of them has; they never exchange blocks of logits. Logits
// are float32 or float64; numbers per row or edge are float64. The value head of a critic is below.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

namespace espalier {

// Logits from the head's product: z = scale raw, then cap tanh(z / cap); cap 0: no cap.
struct LogitShape {
  double scale = 1, cap = 0;

  bool is_plain() const { return scale == 1 && cap == 0; }
};

struct EdgeBlock {
  at::Tensor temperature_B;  // float64
  at::Tensor begin_B1;       // int32: edges [begin_b - begin_0, begin_{b + 1} - begin_0) of `target` leave row b
  at::Tensor target_E;       // int32
  LogitShape shape = {};     // already applied to the logits; logit_gradients goes back through it
};

// With y = (raw - max) / temperature. After score_edges the two sums hold log_sum and entropy instead.
struct LogitSums {
  at::Tensor max_B;                  // max_v raw_v
  at::Tensor sum_exp_B, weighted_B;  // sum_v exp y_v, sum_v y_v exp y_v
};

struct HeadOperations {
  // Applies the shape in place.
  void (*shape_logits)(const LogitShape& shape, const at::Tensor& logits_BV);
  // Overwrites sums with those of these columns, and raw with each target's logit, or 0 if another rank has its column.
  void (*logit_sums)(const EdgeBlock& edges, std::int64_t first, const at::Tensor& logits_BV, const LogitSums& sums,
                     const at::Tensor& raw_E);
  // Rescales the sums to max_B, a maximum at least as large, which becomes sums.max.
  void (*raise_maximum)(const EdgeBlock& edges, const at::Tensor& max_B, const LogitSums& sums);
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
