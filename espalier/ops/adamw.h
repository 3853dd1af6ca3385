// AdamW over flat buffers, and the norm that clips its gradient.
//
//   g = grad grad_scale;  p = p (1 - lr weight_decay);  m = m + (1 - beta1)(g - m);  v = v beta2 + ((1 - beta2) g) g
//   p = p - (lr/(1 - beta1^t) m) / (sqrt(v)/sqrt(1 - beta2^t) + eps),  t = step
// in this order and in the accumulator dtype. Source: Loshchilov and Hutter, "Decoupled weight decay regularization".
#pragma once

#include <cstdint>

namespace at {
class Tensor;
}

namespace espalier {

// The numbers of one update.
struct AdamWStep {
  double lr = 1e-6;
  double beta1 = 0.9, beta2 = 0.999;
  double eps = 1e-8;           // outside the root
  double weight_decay = 0.01;  // decoupled, scaled by lr
  double grad_scale = 1;       // the clipping factor
  std::int64_t step = 1;       // t of the bias corrections; the first step is 1
};

struct OptimizerOperations {
  // Overwrites sum_1 (float64) with sum_i x_i^2, in an order that does not depend on threads.
  void (*sum_of_squares)(const at::Tensor& x, const at::Tensor& sum_1);
  // Overwrites p, m and v. If `rounded` is defined, overwrites it with the new p in bfloat16.
  void (*adamw)(const at::Tensor& p, const at::Tensor& grad, const at::Tensor& m, const at::Tensor& v,
                const AdamWStep& step, const at::Tensor& rounded);
};

}  // namespace espalier
