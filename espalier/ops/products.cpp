#include "espalier/ops/products.h"

#include <ATen/ATen.h>

#include "espalier/ops/cpu/dispatch.h"
#include "espalier/ops/cpu/row_kernels.h"
#include "espalier/ops/cpu/widened_products.h"

namespace espalier {
namespace {

// out = base + a b; base undefined: 0.
void product(const at::Tensor& out, const at::Tensor& base, const at::Tensor& a, const at::Tensor& b) {
  if (widens_products(a.scalar_type())) return widened_product(out, base, a, b);
  at::Tensor into = out;
  base.defined() ? at::addmm_out(into, base, a, b) : at::mm_out(into, a, b);
}

void add_bias_in_place(const at::Tensor& out_RN, const at::Tensor& bias_N) {
  if (!bias_N.defined()) return;
  dispatch(out_RN.scalar_type(), [&]<class T>() {
    rows::add_bias<T>(out_RN.size(0), out_RN.size(1), pointer<T>(bias_N), pointer<T>(out_RN));
  });
}

}  // namespace

void linear(const at::Tensor& out_RN, const at::Tensor& x_RK, const at::Tensor& weight_NK, const at::Tensor& bias_N,
            Timer* timer) {
  const TimedPart timed(timer, part::kProducts);
  product(out_RN, at::Tensor(), x_RK, weight_NK.t());
  add_bias_in_place(out_RN, bias_N);
}

void linear_onto(const at::Tensor& out_RN, const at::Tensor& base_RN, const at::Tensor& x_RK,
                 const at::Tensor& weight_NK, const at::Tensor& bias_N, Timer* timer) {
  const TimedPart timed(timer, part::kProducts);
  product(out_RN, base_RN, x_RK, weight_NK.t());
  add_bias_in_place(out_RN, bias_N);
}

void compute_linear_grad_input(const at::Tensor& grad_x_RK, const at::Tensor& grad_RN, const at::Tensor& weight_NK,
                               Timer* timer) {
  const TimedPart timed(timer, part::kProducts);
  product(grad_x_RK, at::Tensor(), grad_RN, weight_NK);
}

void add_linear_grad_input(const at::Tensor& grad_x_RK, const at::Tensor& grad_RN, const at::Tensor& weight_NK,
                           Timer* timer) {
  const TimedPart timed(timer, part::kProducts);
  product(grad_x_RK, grad_x_RK, grad_RN, weight_NK);
}

void add_linear_grad_weight(const at::Tensor& grad_weight_NK, const at::Tensor& grad_bias_N, const at::Tensor& grad_RN,
                            const at::Tensor& x_RK, Arena& arena, Timer* timer) {
  const TimedPart timed(timer, part::kProducts);
  const at::ScalarType dtype = grad_RN.scalar_type();
  if (grad_weight_NK.scalar_type() == dtype || widens_products(dtype)) {
    product(grad_weight_NK, grad_weight_NK, grad_RN.t(), x_RK);
  } else {
    const ArenaScope scope(arena);
    const at::Tensor rounded = arena.take(grad_weight_NK.sizes(), dtype);
    product(rounded, at::Tensor(), grad_RN.t(), x_RK);
    rows::add(rounded.numel(), pointer<bfloat16>(rounded), pointer<float>(grad_weight_NK));
  }
  if (!grad_bias_N.defined()) return;
  dispatch(dtype, [&]<class T>() {
    rows::add_column_sums<T>(grad_RN.size(0), grad_RN.size(1), pointer<T>(grad_RN), grad_RN.size(1),
                             pointer<accumulator_t<T>>(grad_bias_N));
  });
}

}  // namespace espalier
