#include "espalier/model/products.h"

namespace espalier {
at::Tensor Products::low_rank_room(const at::Tensor& rows, const LowRank& pair) const {
  return arena_.take({rows.size(0), pair.a_rK.size(0)}, rows.scalar_type());
}

void Products::add_low_rank(const at::Tensor& out_RN, const at::Tensor& x_RK, const Projection& projection) const {
  for (const LowRank& pair : projection.low_rank) {
    const ArenaScope scope(arena_);
    low_rank().add(out_RN, x_RK, pair, low_rank_room(x_RK, pair));
  }
}

void Products::add_low_rank_grad_input(const at::Tensor& grad_x_RK, const at::Tensor& grad_RN,
                                       const Projection& projection) const {
  for (const LowRank& pair : projection.low_rank) {
    const ArenaScope scope(arena_);
    low_rank().add_grad_input(grad_x_RK, grad_RN, pair, low_rank_room(grad_RN, pair));
  }
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
  for (std::size_t i = 0; i < grads.low_rank.size(); ++i) {
    const ArenaScope scope(arena_);
    const LowRank& pair = projection.low_rank[i];
    low_rank().add_grad_weight(grads.low_rank[i], grad_RN, x_RK, pair, low_rank_room(x_RK, pair), product_NK);
  }
}

}  // namespace espalier
