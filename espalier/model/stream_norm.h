// RMSNorm of a block's stream, on tensors (formulas: row_kernels.h).
//
// Shapes: R rows, M width. rstd is in the accumulator dtype.
#pragma once

#include <ATen/core/Tensor.h>

namespace espalier {

// Overwrites y_RM and rstd_R.
void norm_forward(const at::Tensor& stream_RM, const at::Tensor& weight_M, double eps, const at::Tensor& y_RM,
                  const at::Tensor& rstd_R);

// Overwrites y_RM with the same values again.
void norm_again(const at::Tensor& stream_RM, const at::Tensor& weight_M, const at::Tensor& rstd_R,
                const at::Tensor& y_RM);

// Adds to grad_stream_RM and to grad_weight_M.
void norm_backward(const at::Tensor& stream_RM, const at::Tensor& weight_M, const at::Tensor& rstd_R,
                   const at::Tensor& grad_y_RM, const at::Tensor& grad_stream_RM, const at::Tensor& grad_weight_M);

}  // namespace espalier
