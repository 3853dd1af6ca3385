// The matrix products of a block (ops/products.h), timed.
#pragma once

#include <ATen/core/Tensor.h>

#include "espalier/device/arena.h"
#include "espalier/metrics/timer.h"
#include "espalier/model/model_views.h"
#include "espalier/ops/operations.h"
#include "espalier/parallel/mesh.h"

namespace espalier {

// Time goes to part::kProducts of `timer`, if there is one. Names, arguments and results: ops/products.h; weight and
// bias are a projection's, whose pairs are included (ops/low_rank.h): h and u [R, r] are computed in the
// arena when needed, one at a time.
class Products {
 public:
  Products(const Operations& operations, Timer* timer, Group& tp, Arena& arena)
      : operations_(operations), timer_(timer), tp_(tp), arena_(arena) {}

  void linear(const at::Tensor& out_RN, const at::Tensor& x_RK, const Projection& projection) const;
  // out = base + sum over tp of x weight^T + bias, with sharded inputs; the first rank adds base and bias.
  void linear_onto(const at::Tensor& out_RN, const at::Tensor& base_RN, const at::Tensor& x_RK,
                   const Projection& projection) const;
  // out = sum over tp of x weight^T + bias, with sharded inputs; the first rank adds the bias.
  void linear_of_ranks(const at::Tensor& out_RN, const at::Tensor& x_RK, const Projection& projection) const;
  void linear_grad_input(const at::Tensor& grad_x_RK, const at::Tensor& grad_RN, const Projection& projection) const;
  void add_linear_grad_input(const at::Tensor& grad_x_RK, const at::Tensor& grad_RN,
                             const Projection& projection) const;
  // Adds gradients of trained parameters; computes nothing if none trains. `projection`: the weights.
  void add_linear_grad_weight(const Projection& grads, const Projection& projection, const at::Tensor& grad_RN,
                              const at::Tensor& x_RK, const at::Tensor& product_NK) const;

 private:
  LowRankProducts low_rank() const { return {operations_, operations_.scale}; }
  // Room for h or u of these rows.
  at::Tensor low_rank_room(const at::Tensor& rows, const LowRank& pair) const;
  void add_low_rank(const at::Tensor& out_RN, const at::Tensor& x_RK, const Projection& projection) const;
  void add_low_rank_grad_input(const at::Tensor& grad_x_RK, const at::Tensor& grad_RN,
                               const Projection& projection) const;

  const Operations& operations_;
  Timer* timer_;
  Group& tp_;
  Arena& arena_;
};

}  // namespace espalier
