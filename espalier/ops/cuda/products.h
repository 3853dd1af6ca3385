// Matrix products in cuBLAS's terms.
#pragma once

#include <ATen/core/Tensor.h>

namespace espalier::cuda {

// c = op(a) op(b) + (adds ? c : 0), column-major: op(a) [m, k], op(b) [k, n], c [m, n], with columns `ld` elements
// apart; op transposes if its flag is set. a and b have dtype `in`, c has `out`; sums use the accumulator of `in`.
struct ColumnProduct {
  bool transpose_a, transpose_b;
  std::int64_t m, n, k;
  const void* a;
  std::int64_t lda;
  const void* b;
  std::int64_t ldb;
  void* c;
  std::int64_t ldc;
  at::ScalarType in, out;
  bool adds;
};

// out += a b, or out = a b. Sums are in float32 (float64 for float64), rounded once to the dtype of out: that of a and
// b, or their accumulator's. Each matrix is contiguous in one dimension, out in the second.
void multiply(const at::Tensor& out_RN, const at::Tensor& a_RK, const at::Tensor& b_KN, bool adds);

// a b_e for the rows of each expert e, [end_{e-1}, end_e), with end_E (int32) on the device, so that the host does not
// wait. The result has memory of its own: the library's functions take no room to write to. Sums as above, rounded once
// to the common dtype. a is contiguous, and b_EKN or its transpose.
// Requires has_grouped_products: bfloat16, k and n multiples of 8, a Hopper GPU or newer, and a torch with CUDA.
at::Tensor multiply_grouped(const at::Tensor& a_RK, const at::Tensor& b_EKN, const at::Tensor& end_E);
bool has_grouped_products(at::ScalarType dtype, std::int64_t k, std::int64_t n);

// Calls cuBLAS in the CUDA library. m, n and k are positive.
void run_product(const ColumnProduct& product);

}  // namespace espalier::cuda
