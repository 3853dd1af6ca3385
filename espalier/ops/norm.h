// RMSNorm over the rows of a stream, forward and backward.
//
//   rstd_r = 1/sqrt(mean_m stream_rm^2 + eps);  y_rm = weight_m (stream_rm rstd_r)
//   with n = stream rstd and u = grad_y weight:
//   grad_stream_r += rstd_r (u_r - n_r mean_m(u_rm n_rm));  grad_weight_m += sum_r grad_y_rm n_rm
//
// Shapes: R rows, M width; all contiguous. rstd and grad_weight are in the accumulator dtype, all else in the stream's.
// bfloat16: statistics in float32; the product with rstd is rounded before the product with weight.
#pragma once

#include <ATen/core/Tensor.h>

namespace espalier {

struct NormOperations {
  // Overwrites y and rstd.
  void (*norm)(const at::Tensor& stream_RM, const at::Tensor& weight_M, double eps, const at::Tensor& y_RM,
               const at::Tensor& rstd_R);
  // Overwrites y with the same values again.
  void (*norm_again)(const at::Tensor& stream_RM, const at::Tensor& weight_M, const at::Tensor& rstd_R,
                     const at::Tensor& y_RM);
  // Adds to grad_stream and grad_weight. grad_weight undefined: the weight does not train.
  void (*add_norm_backward)(const at::Tensor& stream_RM, const at::Tensor& weight_M, const at::Tensor& rstd_R,
                            const at::Tensor& grad_y_RM, const at::Tensor& grad_stream_RM,
                            const at::Tensor& grad_weight_M);
};

}  // namespace espalier
