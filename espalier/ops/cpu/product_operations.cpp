// Matrix products on a CPU: ATen's, with their sums where they are kept.
#include <ATen/ATen.h>

#include "espalier/ops/cpu/compiled_products.h"
#include "espalier/ops/cpu/dispatch.h"
#include "espalier/ops/cpu/operations.h"
#include "espalier/ops/cpu/row_kernels.h"
#include "espalier/ops/cpu/widened_products.h"

namespace espalier::cpu {
namespace {

// out = base + a b; base undefined: 0. The first dimension of out and a are rows.
void multiply(const at::Tensor& out, const at::Tensor& base, const at::Tensor& a, const at::Tensor& b) {
  if (widens_products(a.scalar_type())) return widened_product(out, base, a, b);
  if (a.scalar_type() == at::kBFloat16) return product_of_rows(out, base, a, b);
  at::Tensor into = out;
  base.defined() ? at::addmm_out(into, base, a, b) : at::mm_out(into, a, b);
}

void add_bias(const at::Tensor& out_RN, const at::Tensor& bias_N) {
  if (!bias_N.defined()) return;
  dispatch(out_RN.scalar_type(), [&]<class T>() {
    rows::add_bias<T>(out_RN.size(0), out_RN.size(1), pointer<T>(bias_N), pointer<T>(out_RN));
  });
}

void linear(const at::Tensor& out_RN, const at::Tensor& x_RK, const at::Tensor& weight_NK, const at::Tensor& bias_N) {
  multiply(out_RN, at::Tensor(), x_RK, weight_NK.t());
  add_bias(out_RN, bias_N);
}

void linear_onto(const at::Tensor& out_RN, const at::Tensor& base_RN, const at::Tensor& x_RK,
                 const at::Tensor& weight_NK, const at::Tensor& bias_N) {
  multiply(out_RN, base_RN, x_RK, weight_NK.t());
  add_bias(out_RN, bias_N);
}

void linear_grad_input(const at::Tensor& grad_x_RK, const at::Tensor& grad_RN, const at::Tensor& weight_NK) {
  multiply(grad_x_RK, at::Tensor(), grad_RN, weight_NK);
}

void add_linear_grad_input(const at::Tensor& grad_x_RK, const at::Tensor& grad_RN, const at::Tensor& weight_NK) {
  multiply(grad_x_RK, grad_x_RK, grad_RN, weight_NK);
}

bool rounds_weight_gradients(at::ScalarType dtype) { return dtype == at::kBFloat16 && !widens_products(dtype); }

void add_linear_grad_weight(const at::Tensor& grad_weight_NK, const at::Tensor& grad_bias_N, const at::Tensor& grad_RN,
                            const at::Tensor& x_RK, const at::Tensor& product_NK) {
  const at::ScalarType dtype = grad_RN.scalar_type();
  if (grad_weight_NK.defined()) {
    if (grad_weight_NK.scalar_type() == dtype || !rounds_weight_gradients(dtype))
      multiply(grad_weight_NK, grad_weight_NK, grad_RN.t(), x_RK);
    else
      add_product_over_rows(grad_weight_NK, grad_RN, x_RK, product_NK);
  }
  if (!grad_bias_N.defined()) return;
  dispatch(dtype, [&]<class T>() {
    rows::add_column_sums<T>(grad_RN.size(0), grad_RN.size(1), pointer<T>(grad_RN), grad_RN.size(1),
                             pointer<accumulator_t<T>>(grad_bias_N));
  });
}

}  // namespace

ProductOperations product_operations() {
  return {linear,
          linear_onto,
          linear_grad_input,
          add_linear_grad_input,
          false,
          rounds_weight_gradients,
          add_linear_grad_weight};
}

}  // namespace espalier::cpu
