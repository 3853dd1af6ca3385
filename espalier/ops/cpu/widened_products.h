// bfloat16 products for processors without instructions for them: panels of both factors are widened to float32 and
// multiplied in float32, and a complete sum is rounded once. There the matrix library runs at a tenth of this
// speed.
//
// R rows, N columns, K summed over.
#pragma once

#include <ATen/core/Tensor.h>

namespace espalier {

// True if this process computes products of this dtype in this way.
bool widens_products(at::ScalarType dtype);

// out_RN = base_RN + a_RK b_KN. a, b: bfloat16, each contiguous along one of its dimensions. out: bfloat16, or float32,
// which takes the sum as it is; base: as out, and it may be out; undefined: 0. The calling thread holds three panels of
// float32 (kWidenedPanelBytes of the memory model) from its first call on.
void widened_product(const at::Tensor& out_RN, const at::Tensor& base_RN, const at::Tensor& a_RK,
                     const at::Tensor& b_KN);

}  // namespace espalier
