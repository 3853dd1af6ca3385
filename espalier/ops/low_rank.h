// The products of addends of low rank (Hu et al. 2021, arXiv 2106.09685), composed of plain products. In addition to
// y = x W^T, with h = s x A^T and u = s dL/dy B:
//
//   y += h B^T;  dL/dx += u A;  dA += u^T x;  dB += (dL/dy)^T h
//
// Shapes: R rows, N outputs of the pair, K inputs, r its rank. h and u [R, r] are written to the caller's `room_Rr`.
#pragma once

#include <ATen/core/Tensor.h>

#include "espalier/ops/products.h"

namespace espalier {

// Outputs [first, first + B's rows) += scale (x A^T) B^T.
struct LowRank {
  at::Tensor a_rK, b_Nr;
  std::int64_t first = 0;
  double scale = 1;

  bool defined() const { return b_Nr.defined(); }
};

class LowRankProducts {
 public:
  using Scale = void (*)(const at::Tensor& x, double factor);  // MovingOperations::scale
  LowRankProducts(const ProductOperations& products, Scale scale) : products_(products), scale_(scale) {}

  // Adds to the pair's columns of `out`.
  void add(const at::Tensor& out_RN, const at::Tensor& x_RK, const LowRank& pair, const at::Tensor& room_Rr) const {
    const at::Tensor part = part_of(out_RN, pair);
    products_.linear_onto(part, part, input(x_RK, pair, room_Rr), pair.b_Nr, at::Tensor());
  }
  void add_grad_input(const at::Tensor& grad_x_RK, const at::Tensor& grad_RN, const LowRank& pair,
                      const at::Tensor& room_Rr) const {
    products_.add_linear_grad_input(grad_x_RK, gradient(grad_RN, pair, room_Rr), pair.a_rK);
  }
  // `product`: undefined, or elements of the larger matrix (ProductOperations::add_linear_grad_weight).
  void add_grad_weight(const LowRank& grads, const at::Tensor& grad_RN, const at::Tensor& x_RK, const LowRank& pair,
                       const at::Tensor& room_Rr, const at::Tensor& product) const {
    products_.add_linear_grad_weight(grads.b_Nr, at::Tensor(), part_of(grad_RN, pair), input(x_RK, pair, room_Rr),
                                     product_for(grads.b_Nr, product));
    products_.add_linear_grad_weight(grads.a_rK, at::Tensor(), gradient(grad_RN, pair, room_Rr), x_RK,
                                     product_for(grads.a_rK, product));
  }

 private:
  // The columns that the pair adds to.
  static at::Tensor part_of(const at::Tensor& out_RN, const LowRank& pair) {
    return out_RN.narrow(1, pair.first, pair.b_Nr.size(0));
  }
  // The part of `product` for the rounded gradient of `weight`; undefined if `product` is.
  static at::Tensor product_for(const at::Tensor& weight, const at::Tensor& product) {
    return product.defined() ? product.view(-1).narrow(0, 0, weight.numel()).view(weight.sizes()) : product;
  }
  const at::Tensor& input(const at::Tensor& x_RK, const LowRank& pair, const at::Tensor& h_Rr) const {
    products_.linear(h_Rr, x_RK, pair.a_rK, at::Tensor());
    scale_(h_Rr, pair.scale);
    return h_Rr;
  }
  const at::Tensor& gradient(const at::Tensor& grad_RN, const LowRank& pair, const at::Tensor& u_Rr) const {
    products_.linear_grad_input(u_Rr, part_of(grad_RN, pair), pair.b_Nr);
    scale_(u_Rr, pair.scale);
    return u_Rr;
  }

  const ProductOperations& products_;
  Scale scale_;
};

}  // namespace espalier
