// ATen's names of the dtypes, and the accumulator dtype.
#pragma once

#include <ATen/core/Tensor.h>

#include "espalier/base/dtype.h"
#include "espalier/device/buffers.h"

namespace espalier {

inline at::ScalarType scalar_type(DType dtype) {
  return dtype == DType::float64 ? at::kDouble : dtype == DType::float32 ? at::kFloat : at::kBFloat16;
}
inline at::ScalarType accumulator_type(at::ScalarType dtype) { return dtype == at::kDouble ? at::kDouble : at::kFloat; }
inline ElementBytes element_bytes(at::ScalarType dtype) {
  return {static_cast<std::int64_t>(c10::elementSize(dtype)),
          static_cast<std::int64_t>(c10::elementSize(accumulator_type(dtype)))};
}

}  // namespace espalier
