#include "espalier/model/branch.h"

#include "espalier/base/error.h"

namespace espalier {

void add_branch(const LayerContext& c, const Branch& branch, const at::Tensor& base_RM, const at::Tensor& x_RK,
                const at::Tensor& added_RM, const at::Tensor& out_RM) {
  if (!c.finishes_branch()) return c.products.linear_onto(out_RM, base_RM, x_RK, branch.projection);
  const at::Tensor& product_RM = c.has_norms_after() ? branch.value_RM : added_RM;
  c.products.linear_of_ranks(product_RM, x_RK, branch.projection);
  if (c.has_norms_after())
    c.ops.norm(product_RM, {branch.norm_M, c.shape.norm}, c.shape.rms_norm_eps, added_RM, branch.rstd_R);
  if (out_RM.defined()) c.ops.add_scaled(base_RM, added_RM, c.shape.scales.residual, out_RM);
}

at::Tensor add_branch_backward(const LayerContext& c, const Branch& branch, const at::Tensor& grad_out_RM,
                               const at::Tensor& scratch_RM, const at::Tensor& grad_norm_M) {
  if (!c.finishes_branch()) return grad_out_RM;
  if (!c.has_norms_after()) {
    c.ops.add_scaled({}, grad_out_RM, c.shape.scales.residual, scratch_RM);
    return scratch_RM;
  }
  ESPALIER_INTERNAL(c.shape.scales.residual == 1, "a factor behind a norm");
  c.ops.zero(scratch_RM);
  c.ops.add_norm_backward(branch.value_RM, {branch.norm_M, c.shape.norm}, branch.rstd_R, grad_out_RM, scratch_RM,
                          {grad_norm_M, c.shape.norm});
  return scratch_RM;
}

}  // namespace espalier
