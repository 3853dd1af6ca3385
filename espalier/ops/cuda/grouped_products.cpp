// Products of all experts at once: ATen's grouped products, which read on the device where each expert ends.
#include <ATen/ops/_grouped_mm.h>
#include <ATen/ops/from_blob.h>

#include "espalier/base/error.h"
#include "espalier/ops/cuda/aten.h"
#include "espalier/ops/cuda/products.h"
#include "espalier/ops/cuda/start.h"

namespace espalier::cuda {

// Elsewhere ATen runs one product after the other itself, and waits for the ends.
bool has_grouped_products(at::ScalarType dtype, std::int64_t k, std::int64_t n) {
  constexpr int kHopper = 9, kPack = 8;  // of bfloat16: rows begin at multiples of 16 bytes
  if (dtype != at::kBFloat16 || k % kPack != 0 || n % kPack != 0 || capability() < kHopper) return false;
  return open_aten(gpu_index()).empty();
}

// ATen's allocator uses memory again for later work of the same stream alone, so the result may go while work that
// reads it is queued.
at::Tensor multiply_grouped(const at::Tensor& a_RK, const at::Tensor& b_EKN, const at::Tensor& end_E) {
  const OnOurStream on_our_stream;
  const at::Tensor result = at::_grouped_mm(seen_by_aten(a_RK), seen_by_aten(b_EKN), seen_by_aten(end_E));
  ESPALIER_INTERNAL(result.is_contiguous(), "rows of a grouped product stand apart");
  return at::from_blob(
      result.data_ptr(), result.sizes(), [result](void*) {}, at::TensorOptions().dtype(result.scalar_type()));
}

}  // namespace espalier::cuda
