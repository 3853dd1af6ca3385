// The matrix products of a block (ops/products.h), with their time booked and their scratch taken.
#pragma once

#include <ATen/core/Tensor.h>

#include "espalier/device/arena.h"
#include "espalier/observe/timer.h"
#include "espalier/ops/products.h"

namespace espalier {

// Time goes to part::kProducts of `timer`, where there is one. Names, arguments and results: ops/products.h.
class Products {
 public:
  Products(Arena& arena, Timer* timer) : arena_(arena), timer_(timer) {}

  void linear(const at::Tensor& out_RN, const at::Tensor& x_RK, const at::Tensor& weight_NK,
              const at::Tensor& bias_N) const;
  void linear_onto(const at::Tensor& out_RN, const at::Tensor& base_RN, const at::Tensor& x_RK,
                   const at::Tensor& weight_NK, const at::Tensor& bias_N) const;
  void linear_grad_input(const at::Tensor& grad_x_RK, const at::Tensor& grad_RN, const at::Tensor& weight_NK) const;
  void add_linear_grad_input(const at::Tensor& grad_x_RK, const at::Tensor& grad_RN, const at::Tensor& weight_NK) const;
  void add_linear_grad_weight(const at::Tensor& grad_weight_NK, const at::Tensor& grad_bias_N,
                              const at::Tensor& grad_RN, const at::Tensor& x_RK) const;

 private:
  const ProductOperations& products() const;

  Arena& arena_;
  Timer* timer_;
};

}  // namespace espalier
