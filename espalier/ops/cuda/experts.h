// Routers and experts' rows on a device: contracts in ops/experts.h, ops/cpu/router_kernels.h.
#pragma once

#include <cstdint>

#include "espalier/base/dtype.h"
#include "espalier/ops/router_shape.h"

namespace espalier::cuda {

inline constexpr std::int64_t kMostExperts = 2048;  // of a layer

// Overwrites choice and weight; recorded and correction may be null.
template <class T>
void choose_experts(const moe::RouterShape& shape, const T* logits_RE, const std::int32_t* recorded_RK,
                    const accumulator_t<T>* correction_E, std::int32_t* choice_RK, accumulator_t<T>* weight_RK);

struct Penalty {
  const std::int32_t* group;  // [R]; null: no such penalty, also below
  const double *probability, *z;
};
// Overwrites grad_logits, and penalties [2] if given.
template <class T>
void router_backward(const moe::RouterShape& shape, const T* logits_RE, const std::int32_t* choice_RK,
                     const accumulator_t<T>* grad_weight_RK, const Penalty& penalty, T* grad_logits_RE,
                     double* penalties);

// out_s = weight_s scale_e, e = choice_s; out may be weight.
template <class T>
void scale_by_expert(std::int64_t slots, const accumulator_t<T>* weight_S, const std::int32_t* choice_S,
                     const T* scale_E, accumulator_t<T>* out_S);
// grad_scale_e += sum_s grad_s weight_s over the slots that chose e.
template <class A>
void add_scale_gradient(std::int64_t slots, std::int64_t experts, const A* weight_S, const std::int32_t* choice_S,
                        const A* grad_S, A* grad_scale_E);

void sort_by_expert(const moe::RouterShape& shape, const std::int32_t* choice_RK, std::int32_t* begin_E1,
                    std::int32_t* row_S, std::int32_t* slot_S);

// Places of slots in the order of their experts: [first, first + count).
struct Places {
  std::int64_t first, count;
};
// Overwrites place_S with the place of each slot.
void find_places(std::int64_t slots, const std::int32_t* slot_S, std::int32_t* place_S);
// Overwrites end_E with the number of the window's places for experts 0 to e.
void find_ends(std::int64_t experts, Places window, const std::int32_t* begin_E1, std::int32_t* end_E);

// sum_r += w_s y_s over each row's `chosen` slots inside the window, in order; y has the window's rows. weight null:
// 1.
template <class T>
void add_expert_rows(std::int64_t rows, std::int64_t chosen, std::int64_t width, Places window,
                     const std::int32_t* place_S, const T* y_NM, const accumulator_t<T>* weight_S,
                     accumulator_t<T>* sum_RM);

// sum[row_i] += w[slot_i] y_i; rows are distinct. weight null: 1.
template <class T>
void add_weighted_rows(std::int64_t count, std::int64_t width, const std::int32_t* row, const std::int32_t* slot,
                       const T* y_NM, const accumulator_t<T>* weight_S, accumulator_t<T>* sum_RM);

// y_i += bias of the expert that has entry first + i; contiguous.
template <class T>
void add_expert_bias(std::int64_t count, std::int64_t width, std::int64_t first, std::int64_t experts,
                     const std::int32_t* begin_E1, const T* bias_EW, T* y_NW);

// Entries [first, first + count), of which act and grad_act have F columns, grad_y and the experts' biases M (null:
// none): overwrites grad_weight at their slots with act . grad_act + bias . grad_y, then multiplies grad_act and grad_y
// by their weights.
template <class T>
void weigh_gradient_of_act(std::int64_t count, std::int64_t inner, std::int64_t width, const std::int32_t* slot,
                           const T* act_NF, std::int64_t first, std::int64_t experts, const std::int32_t* begin_E1,
                           const T* bias_EM, const accumulator_t<T>* weight_S, T* grad_act_NF, T* grad_y_NM,
                           accumulator_t<T>* grad_weight_S);

// Entries [0, count) of an expert: overwrites grad_weight at their slots with sum_f grad_up_f up_f, then multiplies
// grad_gate_up and act by their weights.
template <class T>
void weigh_expert_gradient(std::int64_t count, std::int64_t inner, const std::int32_t* slot, const T* gate_up_NW,
                           const accumulator_t<T>* weight_S, T* grad_gate_up_NW, T* act_NF,
                           accumulator_t<T>* grad_weight_S);

}  // namespace espalier::cuda
