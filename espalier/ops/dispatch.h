// Dispatches from ATen's run-time dtype to the kernels' types, once per operation.
#pragma once

#include <ATen/core/Tensor.h>

#include "espalier/base/dtype.h"
#include "espalier/base/error.h"
#include "espalier/device/scalar_type.h"

namespace espalier {

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

// The same for the type of sums: float or double.
template <class Body>
void dispatch_sums(at::ScalarType dtype, Body&& body) {
  dtype == at::kDouble ? body.template operator()<double>() : body.template operator()<float>();
}

// First element of a defined tensor, null for an undefined one (an absent bias or norm).
template <class T>
T* pointer(const at::Tensor& tensor) {
  return tensor.defined() ? static_cast<T*>(tensor.data_ptr()) : nullptr;
}

}  // namespace espalier
