#include "espalier/model/products.h"

namespace espalier {
namespace {

// The columns that the adapter adds to.
at::Tensor part_of(const at::Tensor& out_RN, const LowRank& adapter) {
  return out_RN.narrow(1, adapter.first, adapter.b_Nr.size(0));
}

// Place for the rounded gradient of `weight` in that of the whole projection; undefined where there is none.
at::Tensor product_for(const at::Tensor& weight, const at::Tensor& product_NK) {
  return product_NK.defined() ? product_NK.view(-1).narrow(0, 0, weight.numel()).view(weight.sizes()) : product_NK;
}

}  // namespace

at::Tensor Products::low_rank_input(const at::Tensor& x_RK, const LowRank& adapter) const {
  const at::Tensor h_Rr = arena_.take({x_RK.size(0), adapter.a_rK.size(0)}, x_RK.scalar_type());
  operations_.linear(h_Rr, x_RK, adapter.a_rK, at::Tensor());
  operations_.scale(h_Rr, adapter.scale);
  return h_Rr;
}

at::Tensor Products::low_rank_gradient(const at::Tensor& grad_RN, const LowRank& adapter) const {
  const at::Tensor u_Rr = arena_.take({grad_RN.size(0), adapter.a_rK.size(0)}, grad_RN.scalar_type());
  operations_.linear_grad_input(u_Rr, part_of(grad_RN, adapter), adapter.b_Nr);
  operations_.scale(u_Rr, adapter.scale);
  return u_Rr;
}

void Products::add_low_rank(const at::Tensor& out_RN, const at::Tensor& x_RK, const Projection& projection) const {
  for (const LowRank& adapter : projection.low_rank) {
    const ArenaScope scope(arena_);
    const at::Tensor part = part_of(out_RN, adapter);
    operations_.linear_onto(part, part, low_rank_input(x_RK, adapter), adapter.b_Nr, at::Tensor());
  }
}

void Products::add_low_rank_grad_input(const at::Tensor& grad_x_RK, const at::Tensor& grad_RN,
                                       const Projection& projection) const {
  for (const LowRank& adapter : projection.low_rank) {
    const ArenaScope scope(arena_);
    operations_.add_linear_grad_input(grad_x_RK, low_rank_gradient(grad_RN, adapter), adapter.a_rK);
  }
}

void Products::add_low_rank_grad_weight(const LowRank& grads, const LowRank& adapter, const at::Tensor& grad_RN,
                                        const at::Tensor& x_RK, const at::Tensor& product_NK) const {
  {
    const ArenaScope scope(arena_);
    operations_.add_linear_grad_weight(grads.b_Nr, at::Tensor(), part_of(grad_RN, adapter),
                                       low_rank_input(x_RK, adapter), product_for(grads.b_Nr, product_NK));
  }
  const ArenaScope scope(arena_);
  operations_.add_linear_grad_weight(grads.a_rK, at::Tensor(), low_rank_gradient(grad_RN, adapter), x_RK,
                                     product_for(grads.a_rK, product_NK));
}

void Products::linear(const at::Tensor& out_RN, const at::Tensor& x_RK, const Projection& projection) const {
  const TimedPart timed(timer_, part::kProducts);
  operations_.linear(out_RN, x_RK, projection.weight, projection.bias);
  add_low_rank(out_RN, x_RK, projection);
}

void Products::linear_onto(const at::Tensor& out_RN, const at::Tensor& base_RN, const at::Tensor& x_RK,
                           const Projection& projection) const {
  {
    const TimedPart timed(timer_, part::kProducts);
    if (tp_.rank() == 0)
      operations_.linear_onto(out_RN, base_RN, x_RK, projection.weight, projection.bias);
    else
      operations_.linear(out_RN, x_RK, projection.weight, at::Tensor());
    add_low_rank(out_RN, x_RK, projection);
  }
  tp_.add_over_ranks(out_RN);
}

void Products::linear_of_ranks(const at::Tensor& out_RN, const at::Tensor& x_RK, const Projection& projection) const {
  {
    const TimedPart timed(timer_, part::kProducts);
    operations_.linear(out_RN, x_RK, projection.weight, tp_.rank() == 0 ? projection.bias : at::Tensor());
    add_low_rank(out_RN, x_RK, projection);
  }
  tp_.add_over_ranks(out_RN);
}

void Products::linear_grad_input(const at::Tensor& grad_x_RK, const at::Tensor& grad_RN,
                                 const Projection& projection) const {
  const TimedPart timed(timer_, part::kProducts);
  operations_.linear_grad_input(grad_x_RK, grad_RN, projection.weight);
  add_low_rank_grad_input(grad_x_RK, grad_RN, projection);
}

void Products::add_linear_grad_input(const at::Tensor& grad_x_RK, const at::Tensor& grad_RN,
                                     const Projection& projection) const {
  const TimedPart timed(timer_, part::kProducts);
  operations_.add_linear_grad_input(grad_x_RK, grad_RN, projection.weight);
  add_low_rank_grad_input(grad_x_RK, grad_RN, projection);
}

void Products::add_linear_grad_weight(const Projection& grads, const Projection& projection, const at::Tensor& grad_RN,
                                      const at::Tensor& x_RK, const at::Tensor& product_NK) const {
  if (!grads.trains()) return;
  const TimedPart timed(timer_, part::kProducts);
  operations_.add_linear_grad_weight(grads.weight, grads.bias, grad_RN, x_RK, product_NK);
  for (std::size_t i = 0; i < grads.low_rank.size(); ++i)
    add_low_rank_grad_weight(grads.low_rank[i], projection.low_rank[i], grad_RN, x_RK, product_NK);
}

}  // namespace espalier
