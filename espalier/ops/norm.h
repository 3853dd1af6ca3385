// RMSNorm and LayerNorm over the rows of a stream, forward and backward.
//
//   rstd_r = 1/sqrt(mean_m stream_rm^2 + eps);  y_rm = w_m (stream_rm rstd_r),  w = weight or 1 + weight
//   with n = stream rstd and u = grad_y w:
//   grad_stream_r += rstd_r (u_r - n_r mean_m(u_rm n_rm));  grad_weight_m += sum_r grad_y_rm n_rm
// NormKind::layer:  c = stream - mean(stream), rstd = 1/sqrt(mean c^2 + eps), n = c rstd, y = w n + bias;
//   grad_stream_r += rstd_r (u_r - mean(u_r) - n_r mean_m(u_rm n_rm));  grad_bias_m += sum_r grad_y_rm
//
// Shapes: R rows, M width; all contiguous. rstd and the gradients of weight and bias are in the accumulator dtype, all
// else in the stream's.
// bfloat16: statistics in float32; NormKind says what is rounded.
#pragma once

#include <ATen/core/Tensor.h>

#include <utility>

#include "espalier/shape/block_kinds.h"

namespace espalier {

// The parameters of a norm, or their gradients. A tensor converts to RMSNorm's weight.
struct NormWeights {
  NormWeights(at::Tensor weight, NormKind of = NormKind::rms,
              at::Tensor added = {})  // NOLINT(google-explicit-constructor)
      : weight_M(std::move(weight)), bias_M(std::move(added)), kind(of) {}

  at::Tensor weight_M, bias_M;
  NormKind kind;
};

struct NormOperations {
  // Overwrites y and rstd.
  void (*norm)(const at::Tensor& stream_RM, const NormWeights& weights, double eps, const at::Tensor& y_RM,
               const at::Tensor& rstd_R);
  // Recomputes y from rstd: the same values as from `norm`.
  void (*norm_again)(const at::Tensor& stream_RM, const NormWeights& weights, const at::Tensor& rstd_R,
                     const at::Tensor& y_RM);
  // Adds to grad_stream and the gradients of the weights. Undefined gradients are skipped.
  void (*add_norm_backward)(const at::Tensor& stream_RM, const NormWeights& weights, const at::Tensor& rstd_R,
                            const at::Tensor& grad_y_RM, const at::Tensor& grad_stream_RM,
                            const NormWeights& grad_weights);
};

}  // namespace espalier
