// The router of an expert layer and the experts' products over the rows that chose them.
//
//   p = softmax(logits) or sigmoid(logits);  S = the k largest p + c (c: the correction, 0 if none), ties to the lower
//   expert, from the top groups by the sum of a group's two largest p + c (with a softmax: by its largest);
//   w_j = scaling p_j, or renormalised scaling p_j / sum_S p
//   w_j s_e, where experts have factors s
//   sum_r += sum_{e in S_r} w_e ((f(g_e) u_e) Wd_e^T + bd_e)  with  [g_e u_e] = x_r Wgu_e^T + bgu_e
//   penalties of a row:  sum_e g_e p_e  (auxiliary loss)  and  z (log sum_e exp logit_e)^2
//
// Shapes: R rows, M width, E experts, k of them per row, S = R k slots (slot r k + j: row r at its j-th expert), F
// inner width of an expert, G groups of rows with the same penalty. Choices and slots are int32; weights and sums are
// in the accumulator dtype (weights rounded to the model's dtype, as in Hugging Face), penalties in float64.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include "espalier/ops/low_rank.h"
#include "espalier/shape/block_kinds.h"

namespace espalier {

// How experts are scored and chosen.
struct RouterRule {
  RouterRule(bool norm) : renormalise(norm) {}  // NOLINT(google-explicit-constructor): softmax, all in one group

  bool renormalise, sigmoid = false;
  std::int64_t groups = 1, top_groups = 1;
  double scaling = 1;
  at::Tensor correction_E = {};  // accumulator dtype; undefined: none
};

// Members are undefined if there is no such penalty.
struct RouterPenalty {
  at::Tensor group_R;         // int32
  at::Tensor probability_GE;  // g, float64
  at::Tensor z_G;             // z, float64
};

// Slots sorted by expert: expert e has the entries [begin_e, begin_{e + 1}) of row and slot, rows ascending.
struct SortedSlots {
  at::Tensor begin_E1, row_S, slot_S;
};

struct ExpertWeights {
  at::Tensor gate_up_EWM, down_EMF;                    // [E, 2 F, M], [E, M, F]
  at::Tensor gate_up_bias_EW = {}, down_bias_EM = {};  // or undefined
  ActivationRule activation = {};
  // Pairs of all experts (ops/low_rank.h), their A [E, r, K], B [E, N, r]; on a CPU only.
  std::vector<LowRank> gate_up_low_rank = {}, down_low_rank = {};

  bool adapted() const { return !gate_up_low_rank.empty() || !down_low_rank.empty(); }
};

// Scratch of one expert's products; an expert has at most R rows.
struct ExpertScratch {
  at::Tensor rows_RM, act_RF;
  at::Tensor grad_gate_up_RW;  // backward only
  at::Tensor product;  // backward only, if gradients are rounded before they are added: the largest weight's size
  at::Tensor low_rank_Rr = {};  // with pairs only
};

struct ExpertOperations {
  // Overwrites choice (by falling probability) and weight. If given_RK (int32) is defined, a row with a non-negative
  // first entry takes its S from there.
  void (*choose_experts)(const at::Tensor& logits_RE, const at::Tensor& given_RK, const RouterRule& rule,
                         const at::Tensor& choice_RK, const at::Tensor& weight_RK);
  // dL/dlogits from dL/dweight and the penalties. Overwrites grad_logits and, if it is defined, penalties [2]
  // (float64): the auxiliary and the z penalty, each summed over rows.
  void (*router_backward)(const at::Tensor& logits_RE, const at::Tensor& choice_RK, const RouterRule& rule,
                          const at::Tensor& grad_weight_RK, const RouterPenalty& penalty,
                          const at::Tensor& grad_logits_RE, const at::Tensor& penalties_2);
  // out_j = weight_j s_e, for the slot j of a row that chose e. out may be weight.
  void (*scale_by_expert)(const at::Tensor& weight_RK, const at::Tensor& choice_RK, const at::Tensor& scale_E,
                          const at::Tensor& out_RK);
  // From dL/dout to dL/dweight, in place. Adds to dL/ds_e the sum of dL/dout_j weight_j over the slots that chose e;
  // an undefined one is left out.
  void (*scale_by_expert_backward)(const at::Tensor& weight_RK, const at::Tensor& choice_RK, const at::Tensor& scale_E,
                                   const at::Tensor& grad_RK, const at::Tensor& grad_scale_E);

  // Overwrites all of `sorted`.
  void (*sort_by_expert)(const at::Tensor& choice_RK, const SortedSlots& sorted);

  // Overwrites gate_up [S, 2 F], sorted by expert, and adds to sum. If sum is undefined, the second products are left
  // out. An undefined weight is 1.
  void (*add_experts)(const SortedSlots& sorted, const ExpertWeights& weights, const at::Tensor& x_RM,
                      const at::Tensor& weight_RK, const at::Tensor& gate_up_SW, const at::Tensor& sum_RM,
                      const ExpertScratch& scratch);
  // From dL/d(sum): adds the gradients of the experts' weights to grads and dL/dx to grad_x_sum (accumulator dtype),
  // and overwrites grad_weight_RK. Weights whose member of grads is undefined get no gradient. An undefined weight is 1
  // and has no grad_weight.
  void (*add_experts_backward)(const SortedSlots& sorted, const ExpertWeights& weights, const at::Tensor& x_RM,
                               const at::Tensor& weight_RK, const at::Tensor& gate_up_SW, const at::Tensor& grad_sum_RM,
                               const ExpertWeights& grads, const at::Tensor& grad_x_sum_RM,
                               const at::Tensor& grad_weight_RK, const ExpertScratch& scratch);
  // sum_r += w_s y_s for every slot s of row r, experts in order; y is sorted by expert. The last part of
  // add_experts.
  void (*add_expert_rows)(const SortedSlots& sorted, const at::Tensor& y_SM, const at::Tensor& weight_RK,
                          const at::Tensor& sum_RM);
  // out = base + sum, rounded once; base undefined: 0; out may be base.
  void (*round_sum)(const at::Tensor& base_RM, const at::Tensor& sum_RM, const at::Tensor& out_RM);
};

}  // namespace espalier
