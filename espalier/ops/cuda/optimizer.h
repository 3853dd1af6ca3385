// AdamW and the sum of squares on a device: contracts in ops/adamw.h. P is float or double.
#pragma once

#include <cstdint>

#include "espalier/base/dtype.h"
#include "espalier/ops/adamw.h"

namespace espalier::cuda {

// Overwrites *sum with sum_i x_i^2, in double and in an order that depends on `count` only. Not finite if any x is not
// finite.
template <class P>
void sum_of_squares(std::int64_t count, const P* x, double* sum);
// Bitwise identical to the CPU's AdamW with fused multiply-adds (AVX2, AVX-512). rounded may be null.
template <class P>
void adamw(std::int64_t count, P* p, const P* grad, P* m, P* v, const AdamWStep& step, bfloat16* rounded);

}  // namespace espalier::cuda
