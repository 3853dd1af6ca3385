// The router of an expert layer: the experts and weights of every row, and the backward.
//
//   p = softmax(logits) or sigmoid(logits);  S = the k largest p + correction in the best groups, ties to the lower
//     expert
//   w_j = scaling p_j, or with `renormalise` scaling p_j / sum_S p
//   penalties of a row:  sum_e g_e p_e  (auxiliary loss, g from LoadAccounting)  and  z (log sum_e exp logit_e)^2
//
// Shapes: R rows, E experts, k chosen of them, G groups of rows with the same penalty. T is float, double or bfloat16,
// A = accumulator_t<T>: probabilities and weights are computed in A and weights rounded to T, as Hugging Face does.
// Source: Qwen3-MoE's routing; mathematics, section 7.
#pragma once

#include <cstdint>

#include "espalier/base/dtype.h"
#include "espalier/ops/router_shape.h"

namespace espalier::moe {

// Overwrites choice [R, k] (by falling probability) and weight [R, k]. If given_RK is not null, a row with a
// non-negative first entry takes its S from there (k distinct experts) instead of the k largest.
template <class T>
void choose_experts(const RouterShape& shape, const T* logits_RE, const std::int32_t* given_RK, std::int32_t* choice_RK,
                    accumulator_t<T>* weight_RK, const accumulator_t<T>* correction_E = nullptr);

// Null pointers: no such penalty.
struct RowPenalty {
  const std::int32_t* group_R = nullptr;
  const double* probability_GE = nullptr;  // g
  const double* z_G = nullptr;
};

// Overwrites grad_logits [R, E] with dL/dlogits, given dL/dw [R, k] and the penalties.
template <class T>
PenaltySums router_backward(const RouterShape& shape, const T* logits_RE, const std::int32_t* choice_RK,
                            const accumulator_t<T>* grad_weight_RK, const RowPenalty& penalty, T* grad_logits_RE);

// out_s = weight_s scale_e for each of the slots s, which chose e = choice_s; out may be weight.
template <class T>
void scale_by_expert(std::int64_t slots, const accumulator_t<T>* weight_S, const std::int32_t* choice_S,
                     const T* scale_E, accumulator_t<T>* out_S);
// grad_scale_e += sum_s grad_s weight_s over the slots that chose e, in their order; then grad_s *= scale_e. A null
// grad_scale is left out.
template <class T>
void scale_by_expert_backward(std::int64_t slots, const accumulator_t<T>* weight_S, const std::int32_t* choice_S,
                              const T* scale_E, accumulator_t<T>* grad_S, accumulator_t<T>* grad_scale_E);

}  // namespace espalier::moe
