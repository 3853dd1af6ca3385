// Packed copies of weights for own products of few rows (own_products.h), found by the address of the weights.
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <vector>

namespace espalier {

// ProductOperations::hold_weights for own products. Skips weights that are not contiguous or already held by another
// caller.
std::shared_ptr<void> hold_panels(const std::vector<at::Tensor>& weights_NK, at::ScalarType dtype,
                                  std::int64_t most_bytes);

// The panels of the factor weight_KN, steps K first, for rows of this dtype; null if it is not held whole.
const void* held_panels(const at::Tensor& weight_KN, at::ScalarType dtype);

}  // namespace espalier
