// Sorts rows by expert, so that each expert's products run over one contiguous range without padding; and the
// memory-bound kernels on such ranges.
//
// Shapes: R rows, E experts, k experts a row, S = R k slots (slot r k + j: row r at its j-th expert), N rows of one
// expert, M width, F inner width. T is float, double or bfloat16, A = accumulator_t<T>.
#pragma once

#include <cstdint>

#include "espalier/base/dtype.h"
#include "espalier/ops/router_shape.h"

namespace espalier::moe {

// Overwrites begin [E + 1], row [S] and slot [S]: expert e has the entries [begin[e], begin[e + 1]); its rows are
// distinct and ascend.
void sort_by_expert(const RouterShape& shape, const std::int32_t* choice_RK, std::int32_t* begin_E1,
                    std::int32_t* row_S, std::int32_t* slot_S);

// Entries of one expert: rows of `into` or slots of weights, [N].
struct ExpertRange {
  std::int64_t count = 0;  // N
  const std::int32_t* row = nullptr;
  const std::int32_t* slot = nullptr;
};

// into[row_i] += weight[slot_i] y_i (weight null: 1). y [N, M], into [R, M]. Rows are distinct.
template <class T>
void add_expert_rows(const ExpertRange& range, std::int64_t width, const T* y_NM, const accumulator_t<T>* weight_S,
                     accumulator_t<T>* into_RM);

// From dL/dy of a row, y = act Wd^T + b being its expert's result, and dL/dact, both before the row's weight w:
//   grad_w = act . grad_act + b . grad_y  (b null: 0)
// Overwrites grad_weight at the range's slots; then scales grad_y [N, M] and grad_act [N, F] by w.
template <class T>
void weigh_expert_gradient(const ExpertRange& range, std::int64_t width, std::int64_t inner, const T* act_NF,
                           const T* bias_M, const accumulator_t<T>* weight_S, T* grad_y_NM, T* grad_act_NF,
                           accumulator_t<T>* grad_weight_S);

// out_i = base_i + sum_i (base null: sum), rounded once. out may be base.
template <class T>
void round_sum(std::int64_t count, const T* base, const accumulator_t<T>* sum, T* out);

}  // namespace espalier::moe
