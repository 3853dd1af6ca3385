// Recurrent layers, which pass a state from row to row: the gated delta rule after a short convolution, and its gates.
//
// One value head h over key head g = h / (Hv / Hk), row t of a run:
//   c_t = silu(sum_j conv_j x_{t-K+1+j})  of every channel of q, k and v;  q and k of a head divided by sqrt(sum of
//   squares + 1e-6), q times dk^-1/2;  beta_t = sigmoid(b_t);  gamma_t = exp(-e^A softplus(a_t + dt))
//   e_t = v_t - gamma_t S_{t-1}^T k_t,  S_t = gamma_t S_{t-1} + k_t (beta_t e_t)^T,  o_t = S_t^T q_t
// With one decay per channel (RecurrenceShape::gate_latent), gamma_t = exp(-e^A softplus(a_t + dt)) is a vector [dk],
// gamma_t S is diag(gamma_t) S, and dt is [Hv, dk].
// Mamba-2 (RecurrenceShape::mamba) has no norms of q and k, its e_t does not depend on the state, its convolution may
// have biases, and D v_t is added to the output:
//   s_t = clamp(softplus(a_t + dt)),  beta_t = s_t,  gamma_t = exp(-e^A s_t),  e_t = v_t,  o_t = S_t^T q_t + D v_t
// A run is a sequence of rows without a branch. It begins with the final state of the run before it: S, and the last K
// - 1 inputs x of the convolution, oldest first. All arithmetic is in the accumulator dtype A.
//
// Shapes: T rows, Hk key heads and Hv value heads of dk and dv channels, C = 2 Hk dk + Hv dv channels of the
// convolution (q, k, v), V = Hv dv, W = C + V + 2 Hv columns (decays of channels: C + V + Hv + Hv dk) that a row is
// projected to (shape/model_shape.h says where x, z, b and a stand in them), N numbers of a state: S [Hv, dk, dv], then
// the inputs [K - 1, C]. Mamba-2: W = C + V + Hv.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <span>

#include "espalier/mixers/recurrence/shape.h"

namespace espalier {

// Rows [begin, end), and the states [N] (A, contiguous) around them.
struct StateRun {
  std::int64_t begin = 0, end = 0;
  at::Tensor start_N;  // undefined: 0
  // Overwritten; undefined: not stored. May be start_N if there is no backward and no other run begins with start_N.
  at::Tensor end_N;
  // For a backward. grad_start_N is added to; undefined: dropped. grad_end_N must hold all contributions except from
  // this call's runs; undefined: 0.
  at::Tensor grad_start_N, grad_end_N;
  bool forks = false;  // other runs of the set begin with its last state
};

struct DeltaRuleProblem {
  RecurrenceShape shape;
  at::Tensor projected_TW, conv_CK, a_log_H, dt_bias_H;
  at::Tensor conv_bias_C, skip_H;  // Mamba-2 only: the convolution's biases, or undefined; D
  std::span<const StateRun> runs;  // each after the run that it continues; together all rows if o is computed
};

struct DeltaRuleGradients {
  at::Tensor projected_TW;  // overwritten, except z
  // A; added to; undefined: not computed
  at::Tensor conv_CK, a_log_H, dt_bias_H, conv_bias_C, skip_H;
};

// y = weight o / sqrt(mean o^2 + eps) silu(z), per value head, with a weight [dv]; with one decay per channel,
// sigmoid(z) instead of silu(z).
// Mamba-2: y = weight u / sqrt(mean u^2 + eps), u = o silu(z), with the mean over the value heads of a key head and a
// weight [V].
struct GatedNormProblem {
  RecurrenceShape shape;
  double eps;
  at::Tensor o_TV, projected_TW, weight;
};

struct DeltaRuleOperations {
  // Overwrites o. If o is undefined, computes the states only.
  void (*delta_rule)(const DeltaRuleProblem& problem, const at::Tensor& o_TV);
  // Goes from the last run to the first, so that grad_end_N is complete when its run is reached. Every start_N must
  // hold the state of the forward: delta_rule without o computes the states of forks again.
  void (*add_delta_rule_backward)(const DeltaRuleProblem& problem, const at::Tensor& grad_o_TV,
                                  const DeltaRuleGradients& gradients);
  // Overwrites y.
  void (*gated_norm)(const GatedNormProblem& problem, const at::Tensor& y_TV);
  // Overwrites grad_o, which may be grad_y, and z in grad_projected. Adds to grad_weight (A) if it is defined.
  void (*add_gated_norm_backward)(const GatedNormProblem& problem, const at::Tensor& grad_y_TV,
                                  const at::Tensor& grad_o_TV, const at::Tensor& grad_projected_TW,
                                  const at::Tensor& grad_weight);
  // y = x sigmoid(gate) for R rows of heads with D = head_dim columns; query_gate [R, 2 W] has the query and the gate,
  // [2 D], of each head. Overwrites y.
  void (*gate_heads)(const at::Tensor& x_RW, const at::Tensor& query_gate_RW, std::int64_t head_dim,
                     const at::Tensor& y_RW);
  // Overwrites grad_x, which may be grad_y, and the gates in grad_query_gate.
  void (*gate_heads_backward)(const at::Tensor& x_RW, const at::Tensor& query_gate_RW, std::int64_t head_dim,
                              const at::Tensor& grad_y_RW, const at::Tensor& grad_x_RW,
                              const at::Tensor& grad_query_gate_RW);
};

}  // namespace espalier
