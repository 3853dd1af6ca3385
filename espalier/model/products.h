// The matrix products of a block (ops/products.h), with their time booked.
#pragma once

#include <ATen/core/Tensor.h>

#include "espalier/device/arena.h"
#include "espalier/model/model_views.h"
#include "espalier/observe/timer.h"
#include "espalier/ops/operations.h"
#include "espalier/parallel/mesh.h"

namespace espalier {

// Time goes to part::kProducts of `timer`, where there is one. Names, arguments and results: ops/products.h; weight and
// bias are those of a projection. With its adapters, h = s x A^T, u = s dL/dy B:
//
//   y += h B^T;  dL/dx += u A;  dA += u^T x;  dB += (dL/dy)^T h
//
// h and u are made where they are wanted, in the arena: [R, r], one at a time.
class Products {
 public:
  Products(const Operations& operations, Timer* timer, Group& tp, Arena& arena)
      : operations_(operations), timer_(timer), tp_(tp), arena_(arena) {}

  void linear(const at::Tensor& out_RN, const at::Tensor& x_RK, const Projection& projection) const;
  // out = base + sum over ranks of x weight^T + bias, where ranks divide the inputs; the first one adds base and bias.
  void linear_onto(const at::Tensor& out_RN, const at::Tensor& base_RN, const at::Tensor& x_RK,
                   const Projection& projection) const;
  // out = sum over ranks of x weight^T + bias, where ranks divide the inputs; the first one adds the bias.
  void linear_of_ranks(const at::Tensor& out_RN, const at::Tensor& x_RK, const Projection& projection) const;
  void linear_grad_input(const at::Tensor& grad_x_RK, const at::Tensor& grad_RN, const Projection& projection) const;
  void add_linear_grad_input(const at::Tensor& grad_x_RK, const at::Tensor& grad_RN,
                             const Projection& projection) const;
  // For parameters that train: nothing is computed where none has a gradient. `projection`: the weights.
  void add_linear_grad_weight(const Projection& grads, const Projection& projection, const at::Tensor& grad_RN,
                              const at::Tensor& x_RK, const at::Tensor& product_NK) const;

 private:
  at::Tensor low_rank_input(const at::Tensor& x_RK, const LowRank& adapter) const;        // h
  at::Tensor low_rank_gradient(const at::Tensor& grad_RN, const LowRank& adapter) const;  // u
  void add_low_rank(const at::Tensor& out_RN, const at::Tensor& x_RK, const Projection& projection) const;
  void add_low_rank_grad_input(const at::Tensor& grad_x_RK, const at::Tensor& grad_RN,
                               const Projection& projection) const;
  void add_low_rank_grad_weight(const LowRank& grads, const LowRank& adapter, const at::Tensor& grad_RN,
                                const at::Tensor& x_RK, const at::Tensor& product_NK) const;

  const Operations& operations_;
  Timer* timer_;
  Group& tp_;
  Arena& arena_;
};

}  // namespace espalier
