// Heads of queries or keys, normalised (QK-norm) where there is a weight, then rotated by their row's position.
//
//   n = head weight / sqrt(mean_d head_d^2 + eps);  (a, b) -> (a cos - b sin, b cos + a sin) on the halves of n
//
// Shapes: R rows, W = heads * D columns, N positions of the tables. Rows may stand at a stride; a row's heads are
// contiguous. bfloat16 is rounded where Hugging Face rounds it.
#pragma once

#include <ATen/core/Tensor.h>

namespace espalier {

struct RotaryTables {
  at::Tensor cos, sin;  // [N, D/2], accumulator dtype
  std::int64_t positions() const { return cos.defined() ? cos.size(0) : 0; }
};

struct Rotation {
  RotaryTables tables;
  at::Tensor position_R;     // int32
  at::Tensor norm_weight_D;  // undefined: no norm
  double eps;
};

struct RotationOperations {
  // Overwrites out.
  void (*rotate)(const Rotation& rotation, const at::Tensor& in_RW, const at::Tensor& out_RW);
  // From the same `in`. Overwrites grad_in; adds to grad_norm_weight (accumulator dtype) where there is a weight that
  // trains; else it is undefined.
  // grad_out is in the dtype of `in` or its accumulator's.
  void (*add_rotate_backward)(const Rotation& rotation, const at::Tensor& in_RW, const at::Tensor& grad_out_RW,
                              const at::Tensor& grad_in_RW, const at::Tensor& grad_norm_weight_D);
};

}  // namespace espalier
