// bfloat16 products by the matrix library, on processors with instructions for them. The library compiles a kernel for
// every new number of rows, in about half a millisecond, and keeps it: 0.6 MiB (measured). Rows are therefore passed in
// pieces of a few sizes, so that a run of any length compiles a bounded number of kernels.
//
// R rows, N columns, K summed over. All bfloat16, each contiguous along one of its dimensions.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

namespace espalier {

// Pieces of a product of R rows: full pieces of the first size, then of the second. The rows behind them are one more
// piece, of the third size if that is enough: it is padded with rows of 0, or computes rows of the piece before again.
inline constexpr std::int64_t kPieceRows = 256, kSmallPieceRows = 32, kFewPieceRows = 8;

// out_RN = base_RN + a_RK b_KN. Overwrites out, which may be base; base undefined: 0.
void product_of_rows(const at::Tensor& out_RN, const at::Tensor& base_RN, const at::Tensor& a_RK,
                     const at::Tensor& b_KN);

// sum_NK += grad_RN^T x_RK, sum in float32. The product of a full piece is rounded to bfloat16 before it is added; the
// remaining rows are multiplied in float32 (widened_products.h). Overwrites product_NK.
void add_product_over_rows(const at::Tensor& sum_NK, const at::Tensor& grad_RN, const at::Tensor& x_RK,
                           const at::Tensor& product_NK);

}  // namespace espalier
