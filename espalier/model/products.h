// The matrix products of a block (ops/products.h), with their time booked.
#pragma once

#include <ATen/core/Tensor.h>

#include "espalier/model/model_views.h"
#include "espalier/observe/timer.h"
#include "espalier/ops/operations.h"
#include "espalier/parallel/mesh.h"

namespace espalier {

// Time goes to part::kProducts of `timer`, where there is one. Names, arguments and results: ops/products.h; weight and
// bias are those of a projection.
class Products {
 public:
  Products(const Operations& operations, Timer* timer, Group& tp = mesh_of_one().tp)
      : operations_(operations), timer_(timer), tp_(tp) {}

  void linear(const at::Tensor& out_RN, const at::Tensor& x_RK, const Projection& projection) const;
  // out = base + sum over ranks of x weight^T + bias, where ranks divide the inputs; the first one adds base and bias.
  void linear_onto(const at::Tensor& out_RN, const at::Tensor& base_RN, const at::Tensor& x_RK,
                   const Projection& projection) const;
  // out = sum over ranks of x weight^T + bias, where ranks divide the inputs; the first one adds the bias.
  void linear_of_ranks(const at::Tensor& out_RN, const at::Tensor& x_RK, const Projection& projection) const;
  void linear_grad_input(const at::Tensor& grad_x_RK, const at::Tensor& grad_RN, const Projection& projection) const;
  void add_linear_grad_input(const at::Tensor& grad_x_RK, const at::Tensor& grad_RN,
                             const Projection& projection) const;
  // For parameters that train: nothing is computed where neither weight nor bias has a gradient.
  void add_linear_grad_weight(const Projection& grads, const at::Tensor& grad_RN, const at::Tensor& x_RK,
                              const at::Tensor& product_NK) const;

 private:
  const ProductOperations& operations_;
  Timer* timer_;
  Group& tp_;
};

}  // namespace espalier
