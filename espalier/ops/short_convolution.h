// A short convolution between two gates (LFM2, arXiv 2511.23404), which passes a state from row to row:
//
//   u_t = b_t x_t,  m_t = bias + sum_j w_j u_{t - K + 1 + j},  y_t = c_t m_t          of each channel
//
// A run begins with the final state of the run before it: the last K - 1 rows of u, oldest first. All arithmetic is in
// the accumulator dtype A.
//
// Shapes: T rows, C channels, W = 3 C columns of a projected row (b, c, x), K rows of the convolution.
#pragma once

#include <ATen/core/Tensor.h>

#include <span>

#include "espalier/mixers/short_convolution/shape.h"
#include "espalier/ops/delta_rule.h"

namespace espalier {

struct ShortConvolutionProblem {
  ShortConvolutionShape shape;
  at::Tensor projected_TW, conv_CK;
  at::Tensor conv_bias_C;          // undefined: none
  std::span<const StateRun> runs;  // each after the run that it continues; together all rows if y is computed
};

struct ShortConvolutionGradients {
  at::Tensor projected_TW;          // overwritten
  at::Tensor conv_CK, conv_bias_C;  // A; added to; undefined: not computed
};

struct ShortConvolutionOperations {
  // Overwrites y. If y is undefined, computes the states only.
  void (*short_convolution)(const ShortConvolutionProblem& problem, const at::Tensor& y_TC);
  // Goes from the last run to the first, so that grad_end_N is complete when its run is reached. Every start_N must
  // hold the state of the forward.
  void (*add_short_convolution_backward)(const ShortConvolutionProblem& problem, const at::Tensor& grad_y_TC,
                                         const ShortConvolutionGradients& gradients);
};

}  // namespace espalier
