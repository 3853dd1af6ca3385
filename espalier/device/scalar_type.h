// ATen's names of the number types, and the type sums are kept in.
#pragma once

#include <ATen/core/Tensor.h>

#include "espalier/base/dtype.h"

namespace espalier {

inline at::ScalarType scalar_type(DType dtype) {
  return dtype == DType::float64 ? at::kDouble : dtype == DType::float32 ? at::kFloat : at::kBFloat16;
}
inline at::ScalarType accumulator_type(at::ScalarType dtype) { return dtype == at::kDouble ? at::kDouble : at::kFloat; }

}  // namespace espalier
