// The optimizer's two passes over a flat buffer: the squared norm, and one AdamW step.
//
// T is float or double: parameters (master weights), gradients and both moments have the same type. All kernels use
// the threads of OpenMP; results are the same bits for any number of threads.
// Source: Loshchilov and Hutter, "Decoupled weight decay regularization"; roundings as torch.optim.AdamW on a CPU,
// except that its square root may be off by one unit in the last place where this one is exact to rounding.
#pragma once

#include <cstdint>

#include "espalier/base/dtype.h"
#include "espalier/ops/adamw.h"

namespace espalier {

// sum_i x_i^2, summed in double: blocks of fixed length, added in order. The same bits for any instruction set.
template <class T>
double sum_of_squares(std::int64_t count, const T* x);

// With g = grad * grad_scale and t = step, in this order, each operation rounded once to T (the last addition of m and
// of v is fused with the product before it where the processor can, as in torch):
//   p  = p (1 - lr weight_decay)
//   m  = m + (1 - beta1)(g - m)
//   v  = v beta2 + ((1 - beta2) g) g
//   p  = p - (lr/(1 - beta1^t) m) / (sqrt(v)/sqrt(1 - beta2^t) + eps)
// Overwrites p, m, v [count]; reads grad [count]; where `rounded` [count] is given it is overwritten with the new p in
// bfloat16. No two of the buffers overlap.
template <class T>
void adamw(std::int64_t count, T* p, const T* grad, T* m, T* v, const AdamWStep& step, bfloat16* rounded);

}  // namespace espalier
