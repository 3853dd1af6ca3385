#include "espalier/model/products.h"

namespace espalier {

void Products::linear(const at::Tensor& out_RN, const at::Tensor& x_RK, const at::Tensor& weight_NK,
                      const at::Tensor& bias_N) const {
  const TimedPart timed(timer_, part::kProducts);
  operations_.linear(out_RN, x_RK, weight_NK, bias_N);
}

void Products::linear_onto(const at::Tensor& out_RN, const at::Tensor& base_RN, const at::Tensor& x_RK,
                           const at::Tensor& weight_NK, const at::Tensor& bias_N) const {
  const TimedPart timed(timer_, part::kProducts);
  operations_.linear_onto(out_RN, base_RN, x_RK, weight_NK, bias_N);
}

void Products::linear_grad_input(const at::Tensor& grad_x_RK, const at::Tensor& grad_RN,
                                 const at::Tensor& weight_NK) const {
  const TimedPart timed(timer_, part::kProducts);
  operations_.linear_grad_input(grad_x_RK, grad_RN, weight_NK);
}

void Products::add_linear_grad_input(const at::Tensor& grad_x_RK, const at::Tensor& grad_RN,
                                     const at::Tensor& weight_NK) const {
  const TimedPart timed(timer_, part::kProducts);
  operations_.add_linear_grad_input(grad_x_RK, grad_RN, weight_NK);
}

void Products::add_linear_grad_weight(const at::Tensor& grad_weight_NK, const at::Tensor& grad_bias_N,
                                      const at::Tensor& grad_RN, const at::Tensor& x_RK,
                                      const at::Tensor& product_NK) const {
  const TimedPart timed(timer_, part::kProducts);
  operations_.add_linear_grad_weight(grad_weight_NK, grad_bias_N, grad_RN, x_RK, product_NK);
}

}  // namespace espalier
