// From ATen's run-time dtype to the types the kernels are written for, once per operation.
#pragma once

#include <ATen/core/Tensor.h>

#include "espalier/base/dtype.h"
#include "espalier/base/error.h"

namespace espalier {

inline at::ScalarType scalar_type(DType dtype) {
  return dtype == DType::float64 ? at::kDouble : dtype == DType::float32 ? at::kFloat : at::kBFloat16;
}
inline at::ScalarType accumulator_type(at::ScalarType dtype) { return dtype == at::kDouble ? at::kDouble : at::kFloat; }

// Calls body.template operator()<T>() with T = double, float or bfloat16.
template <class Body>
void dispatch(at::ScalarType dtype, Body&& body) {
  switch (dtype) {
    case at::kDouble:
      return body.template operator()<double>();
    case at::kFloat:
      return body.template operator()<float>();
    case at::kBFloat16:
      return body.template operator()<bfloat16>();
    default:
      ESPALIER_INTERNAL(false, "dtype ", c10::toString(dtype));
  }
}

// First element of a defined tensor, null for an undefined one (an absent bias or norm).
template <class T>
T* pointer(const at::Tensor& tensor) {
  return tensor.defined() ? static_cast<T*>(tensor.data_ptr()) : nullptr;
}

}  // namespace espalier
