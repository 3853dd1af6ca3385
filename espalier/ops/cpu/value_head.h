// The head of a critic: one number a row, v_o = hidden_o . weight + bias, and its gradients.
//
// Shapes: O output rows, M width. Dot products and sums are in double; nothing is taken from an arena.
#pragma once

#include <ATen/core/Tensor.h>

#include <span>

namespace espalier {

struct ValueHeadProblem {
  at::Tensor hidden_OM;  // float64, float32 or bfloat16, contiguous
  at::Tensor weight_M;   // same dtype
  at::Tensor bias_1;     // same dtype
};

struct ValueHeadGradients {
  at::Tensor grad_hidden_OM;  // same dtype as hidden, overwritten
  at::Tensor grad_weight_M;   // accumulator dtype (float32; float64 in float64 runs), added to
  at::Tensor grad_bias_1;     // accumulator dtype, added to
};

// Overwrites value [O].
void value_head_forward(const ValueHeadProblem& problem, std::span<double> value);

// grad_hidden_o = g_o weight ; grad_weight += sum_o g_o hidden_o ; grad_bias += sum_o g_o, with g_o = dL/dv_o [O].
void value_head_backward(const ValueHeadProblem& problem, std::span<const double> grad_value,
                         const ValueHeadGradients& out);

}  // namespace espalier
