// Heads of queries or keys: normalised (QK-norm) if there is a weight, then rotated by their row's position.
//
//   n = head w / sqrt(mean_d head_d^2 + eps), w = weight or 1 + weight; or with the mean over all heads of the row
//   (a, b) -> (a cos - b sin, b cos + a sin) on the two halves of n's first K channels; the other channels stay.
//   Without a norm, the pairs may be even and odd channels, and the K channels may begin at another channel F.
//
// Shapes: R rows, W = heads * D columns, N positions of the tables, K channels that rotate. Rows may have a stride; a
// row's heads are contiguous. bfloat16 is rounded where Hugging Face rounds it.
#pragma once

#include <ATen/core/Tensor.h>

#include "espalier/shape/block_kinds.h"

namespace espalier {

struct RotaryTables {
  at::Tensor cos, sin;  // [N, K/2], accumulator dtype
  std::int64_t positions() const { return cos.defined() ? cos.size(0) : 0; }
};

struct Rotation {
  RotaryTables tables;
  at::Tensor position_R;     // int32
  at::Tensor norm_weight_D;  // undefined: no norm; [W] if the norm is over all heads
  double eps;
  std::int64_t head_dim = 0;  // D; 0: K
  bool interleaved = false;   // channels 2i and 2i + 1 are a pair
  NormKind norm = NormKind::rms;
  std::int64_t first = 0;  // F

  std::int64_t head_width() const { return head_dim > 0 ? head_dim : 2 * tables.cos.size(1); }
  bool has_wide_norm() const { return norm_weight_D.defined() && norm_weight_D.size(0) != head_width(); }
  // True if the kernels for RMSNorm and rotated halves can run it.
  bool is_plain() const {
    return head_width() == 2 * tables.cos.size(1) && first == 0 && !interleaved && norm == NormKind::rms &&
           !has_wide_norm();
  }
};

struct RotationOperations {
  // Overwrites out, which may be `in`.
  void (*rotate)(const Rotation& rotation, const at::Tensor& in_RW, const at::Tensor& out_RW);
  // `in`: as it was before rotate. grad_out is in the dtype of `in` or of its accumulator. Overwrites grad_in; adds to
  // grad_norm_weight (accumulator dtype), which is undefined if there is no trained weight.
  void (*add_rotate_backward)(const Rotation& rotation, const at::Tensor& in_RW, const at::Tensor& grad_out_RW,
                              const at::Tensor& grad_in_RW, const at::Tensor& grad_norm_weight_D);
};

}  // namespace espalier
