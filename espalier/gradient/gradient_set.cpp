#include "espalier/gradient/gradient_set.h"

#include <ATen/ATen.h>

namespace espalier {

GradientSet::GradientSet(const ParameterTable& table, const ModelShape& shape, at::ScalarType accumulator)
    : flat_(at::zeros({table.size()}, at::TensorOptions().dtype(accumulator))),
      views_(view_model(flat_, table, shape)) {}

void GradientSet::zero() { flat_.zero_(); }

}  // namespace espalier
