// The addition of attention or MLP to the stream: out = base + f norm(b), b its last product (NormPlace, Scales).
//
// Shapes: R rows, M width.
#pragma once

#include "espalier/model/layer_context.h"

namespace espalier {

struct Branch {
  at::Tensor norm_M;            // undefined: no norm
  at::Tensor value_RM, rstd_R;  // b and its 1/rms, kept if there is a norm
  Projection projection;        // the last product
};

// Overwrites out with base + f norm(x W^T + bias). If out is undefined, only the branch's members are recomputed. added
// [R, M]: scratch if context.finishes_branch().
void add_branch(const LayerContext& context, const Branch& branch, const at::Tensor& base_RM, const at::Tensor& x_RK,
                const at::Tensor& added_RM, const at::Tensor& out_RM);

// dL/db from dL/dout: grad_out itself, or `scratch`, overwritten. Adds to the gradient of the norm.
at::Tensor add_branch_backward(const LayerContext& context, const Branch& branch, const at::Tensor& grad_out_RM,
                               const at::Tensor& scratch_RM, const at::Tensor& grad_norm_M);

}  // namespace espalier
