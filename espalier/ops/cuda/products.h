// Products of matrices, as cuBLAS is asked for them.
#pragma once

#include <ATen/core/Tensor.h>

namespace espalier::cuda {

// c = op(a) op(b) + (adds ? c : 0) in columns: op(a) [m, k], op(b) [k, n], c [m, n], each column `ld` elements behind
// the one before; op transposes where it says so. a and b are of `in`, c of `out`; sums are in the accumulator of `in`.
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

// out += a b, or out = a b: sums in float32, of float64 in float64, rounded once to the dtype of out, which is that of
// a and b or their accumulator's. Matrices, each contiguous in one of its dimensions; out in the second.
void multiply(const at::Tensor& out_RN, const at::Tensor& a_RK, const at::Tensor& b_KN, bool adds);

// out = a b_e for the rows of each expert e, [end_{e-1}, end_e) with end_E (int32) on the device: the host does not
// wait for it. Sums as above, rounded once to the dtype of all three. a and out contiguous, b_EKN or its transpose,
// too. Only where has_grouped_products.
void multiply_grouped(const at::Tensor& out_RN, const at::Tensor& a_RK, const at::Tensor& b_EKN,
                      const at::Tensor& end_E);
bool has_grouped_products(at::ScalarType dtype, std::int64_t k, std::int64_t n);

// cuBLAS in the CUDA library. m, n and k are positive.
void run_product(const ColumnProduct& product);

}  // namespace espalier::cuda
