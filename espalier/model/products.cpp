#include "espalier/model/products.h"

namespace espalier {

void Products::linear(const at::Tensor& out_RN, const at::Tensor& x_RK, const Projection& projection) const {
  const TimedPart timed(timer_, part::kProducts);
  operations_.linear(out_RN, x_RK, projection.weight, projection.bias);
}

void Products::linear_onto(const at::Tensor& out_RN, const at::Tensor& base_RN, const at::Tensor& x_RK,
                           const Projection& projection) const {
  {
    const TimedPart timed(timer_, part::kProducts);
    if (tp_.rank() == 0)
      operations_.linear_onto(out_RN, base_RN, x_RK, projection.weight, projection.bias);
    else
      operations_.linear(out_RN, x_RK, projection.weight, at::Tensor());
  }
  tp_.add_over_ranks(out_RN);
}

void Products::linear_of_ranks(const at::Tensor& out_RN, const at::Tensor& x_RK, const Projection& projection) const {
  {
    const TimedPart timed(timer_, part::kProducts);
    operations_.linear(out_RN, x_RK, projection.weight, tp_.rank() == 0 ? projection.bias : at::Tensor());
  }
  tp_.add_over_ranks(out_RN);
}

void Products::linear_grad_input(const at::Tensor& grad_x_RK, const at::Tensor& grad_RN,
                                 const Projection& projection) const {
  const TimedPart timed(timer_, part::kProducts);
  operations_.linear_grad_input(grad_x_RK, grad_RN, projection.weight);
}

void Products::add_linear_grad_input(const at::Tensor& grad_x_RK, const at::Tensor& grad_RN,
                                     const Projection& projection) const {
  const TimedPart timed(timer_, part::kProducts);
  operations_.add_linear_grad_input(grad_x_RK, grad_RN, projection.weight);
}

void Products::add_linear_grad_weight(const Projection& grads, const at::Tensor& grad_RN, const at::Tensor& x_RK,
                                      const at::Tensor& product_NK) const {
  if (!grads.trains()) return;
  const TimedPart timed(timer_, part::kProducts);
  operations_.add_linear_grad_weight(grads.weight, grads.bias, grad_RN, x_RK, product_NK);
}

}  // namespace espalier
