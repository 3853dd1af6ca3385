#include "espalier/model/products.h"

#include "espalier/ops/operations.h"

namespace espalier {

const ProductOperations& Products::products() const { return arena_.device().operations(); }

void Products::linear(const at::Tensor& out_RN, const at::Tensor& x_RK, const at::Tensor& weight_NK,
                      const at::Tensor& bias_N) const {
  const TimedPart timed(timer_, part::kProducts);
  products().linear(out_RN, x_RK, weight_NK, bias_N);
}

void Products::linear_onto(const at::Tensor& out_RN, const at::Tensor& base_RN, const at::Tensor& x_RK,
                           const at::Tensor& weight_NK, const at::Tensor& bias_N) const {
  const TimedPart timed(timer_, part::kProducts);
  products().linear_onto(out_RN, base_RN, x_RK, weight_NK, bias_N);
}

void Products::linear_grad_input(const at::Tensor& grad_x_RK, const at::Tensor& grad_RN,
                                 const at::Tensor& weight_NK) const {
  const TimedPart timed(timer_, part::kProducts);
  products().linear_grad_input(grad_x_RK, grad_RN, weight_NK);
}

void Products::add_linear_grad_input(const at::Tensor& grad_x_RK, const at::Tensor& grad_RN,
                                     const at::Tensor& weight_NK) const {
  const TimedPart timed(timer_, part::kProducts);
  products().add_linear_grad_input(grad_x_RK, grad_RN, weight_NK);
}

void Products::add_linear_grad_weight(const at::Tensor& grad_weight_NK, const at::Tensor& grad_bias_N,
                                      const at::Tensor& grad_RN, const at::Tensor& x_RK) const {
  const TimedPart timed(timer_, part::kProducts);
  const ArenaScope scope(arena_);
  at::Tensor product_NK;
  const at::ScalarType dtype = grad_RN.scalar_type();
  if (grad_weight_NK.scalar_type() != dtype && products().rounds_weight_gradients(dtype))
    product_NK = arena_.take(grad_weight_NK.sizes(), dtype);
  products().add_linear_grad_weight(grad_weight_NK, grad_bias_N, grad_RN, x_RK, product_NK);
}

}  // namespace espalier
