#include "espalier/ops/cuda/products.h"

#include <algorithm>

#include "espalier/base/error.h"
#include "espalier/ops/cuda/launch.h"

namespace espalier::cuda {
namespace {

// A matrix of rows is its transpose, read in columns.
struct InColumns {
  bool transposed;
  std::int64_t ld;
};
InColumns in_columns(const at::Tensor& x) {
  const std::int64_t rows = x.size(0), columns = x.size(1);
  if (x.stride(1) == 1 || columns == 1) return {true, std::max(rows == 1 ? 0 : x.stride(0), columns)};
  ESPALIER_INTERNAL(x.stride(0) == 1 || rows == 1, "a factor that is contiguous in neither dimension");
  return {false, std::max(x.stride(1), rows)};
}

}  // namespace

// out^T = b^T a^T: what stands in rows is its transpose in columns.
void multiply(const at::Tensor& out_RN, const at::Tensor& a_RK, const at::Tensor& b_KN, bool adds) {
  const std::int64_t R = out_RN.size(0), N = out_RN.size(1), K = a_RK.size(1);
  if (R == 0 || N == 0) return;
  const InColumns a = in_columns(a_RK), b = in_columns(b_KN), out = in_columns(out_RN);
  ESPALIER_INTERNAL(out.transposed, "a result whose rows are not contiguous");
  if (K == 0) {
    ESPALIER_INTERNAL(adds || out_RN.is_contiguous(), "an empty product into strided rows");
    if (!adds) fill_zero(out_RN.data_ptr(), static_cast<std::size_t>(out_RN.numel() * out_RN.element_size()));
    return;
  }
  run_product({.transpose_a = !b.transposed,
               .transpose_b = !a.transposed,
               .m = N,
               .n = R,
               .k = K,
               .a = b_KN.data_ptr(),
               .lda = b.ld,
               .b = a_RK.data_ptr(),
               .ldb = a.ld,
               .c = out_RN.data_ptr(),
               .ldc = out.ld,
               .in = a_RK.scalar_type(),
               .out = out_RN.scalar_type(),
               .adds = adds});
}

}  // namespace espalier::cuda
