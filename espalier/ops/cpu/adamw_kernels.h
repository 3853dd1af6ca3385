// The optimizer's two passes over a flat buffer: the squared norm, and one AdamW step.
//
// T is float or double: parameters (master weights), gradients and both moments have the same type. All kernels use the
// threads of OpenMP; results are the same bits for any number of threads. Source: Loshchilov and Hutter, "Decoupled
// weight decay regularization"; rounded as torch.optim.AdamW on a CPU, except that torch's square root may be off by
// one unit in the last place and this one is correctly rounded.
#pragma once

#include <cstdint>

#include "espalier/base/dtype.h"
#include "espalier/ops/adamw.h"

namespace espalier {

// sum_i x_i^2, summed in double: blocks of fixed length, added in order. The same bits for any instruction set.
template <class T>
double sum_of_squares(std::int64_t count, const T* x);

// With g = grad * grad_scale and t = step, in this order, each operation rounded once to T (the last addition of m and
// of v is fused with its product if the processor can, as in torch):
//   p  = p (1 - lr weight_decay)
//   m  = m + (1 - beta1)(g - m)
//   v  = v beta2 + ((1 - beta2) g) g
//   p  = p - (lr/(1 - beta1^t) m) / (sqrt(v)/sqrt(1 - beta2^t) + eps)
// Overwrites p, m, v [count]; reads grad [count]; if `rounded` [count] is given, overwrites it with the new p in
// bfloat16. The buffers must not overlap.
template <class T>
void adamw(std::int64_t count, T* p, const T* grad, T* m, T* v, const AdamWStep& step, bfloat16* rounded);

}  // namespace espalier
