// The router of an expert layer: which experts a row goes to, with what weights, and back.
//
//   p = softmax(logits);  S = the k largest p, ties to the lower expert index
//   w_j = p_j, or with `renormalise` p_j / sum_S p
//   penalties of a row:  sum_e g_e p_e  (auxiliary loss, g from LoadAccounting)  and  z (log sum_e exp logit_e)^2
//
// Shapes: R rows, E experts, k chosen of them, G groups of rows with the same penalty. T is float, double or bfloat16,
// A = accumulator_t<T>: probabilities and weights are computed in A and weights rounded to T, as Hugging Face does.
// Source: Qwen3-MoE's routing; mathematics, section 7.
#pragma once

#include <cstdint>

#include "espalier/base/dtype.h"

namespace espalier::moe {

struct RouterShape {
  std::int64_t rows = 0, experts = 0, chosen = 0;  // R, E, k
  bool renormalise = false;
};

// Overwrites choice [R, k] (by falling probability) and weight [R, k]. Where recorded [R] is given, a row whose pointer
// is not null takes its S from there (k distinct experts) instead of the k largest; all else stays the same.
template <class T>
void choose_experts(const RouterShape& shape, const T* logits_RE, const std::uint16_t* const* recorded_R,
                    std::int32_t* choice_RK, accumulator_t<T>* weight_RK);

// Null pointers: no such penalty.
struct RouterPenalty {
  const std::int32_t* group_R = nullptr;
  const double* probability_GE = nullptr;  // g
  const double* z_G = nullptr;
};

// Values of the penalties, summed over rows in their order.
struct PenaltySums {
  double aux = 0, z = 0;
};

// Overwrites grad_logits [R, E] with dL/dlogits, given dL/dw [R, k] and the penalties.
template <class T>
PenaltySums router_backward(const RouterShape& shape, const T* logits_RE, const std::int32_t* choice_RK,
                            const accumulator_t<T>* grad_weight_RK, const RouterPenalty& penalty, T* grad_logits_RE);

}  // namespace espalier::moe
