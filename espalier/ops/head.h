// A block of raw logits: the log-probs and entropies of its rows' edges, and in place the gradient of the logits.
//
//   z_bv = raw_bv / temperature_b;  lse_b = log sum_v exp z_bv
//   logprob_e = z_{b(e), target(e)} - lse_{b(e)};  entropy_b = lse_b - sum_v p_bv z_bv
//   d raw_bv = (sum_{e of b} g_e (1[v = target_e] - p_bv) - h_b p_bv (log p_bv + entropy_b)) / temperature_b
// with g_e = dL/dlogprob_e and h_b the sum of dL/dentropy over the row's edges. Nothing overflows, however large the
// logits are.
//
// Shapes: B rows, V vocabulary, E edges of these rows, in order of their rows. Logits are float32 or float64; numbers
// of edges float64. The value head of a critic is below.
#pragma once

#include <ATen/core/Tensor.h>

namespace espalier {

struct EdgeBlock {
  at::Tensor temperature_B;  // float64
  at::Tensor begin_B1;       // int32: edges [begin_b - begin_0, begin_{b + 1} - begin_0) of `target` leave row b
  at::Tensor target_E;       // int32
};

struct HeadOperations {
  // Overwrites sums [B, 3], which compute_logit_gradients reads, logprob and entropy.
  void (*score_logits)(const EdgeBlock& edges, const at::Tensor& logits_BV, const at::Tensor& sums_B3,
                       const at::Tensor& logprob_E, const at::Tensor& entropy_E);
  // Overwrites the logits with their gradient.
  void (*logit_gradients)(const EdgeBlock& edges, const at::Tensor& sums_B3, const at::Tensor& grad_logprob_E,
                          const at::Tensor& grad_entropy_E, const at::Tensor& logits_BV);

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
