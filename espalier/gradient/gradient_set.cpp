#include "espalier/gradient/gradient_set.h"

#include "espalier/ops/operations.h"

namespace espalier {

GradientSet::GradientSet(const ParameterTable& table, const ModelShape& shape, at::ScalarType accumulator,
                         Device& device)
    : device_(device), flat_(device.allocate({table.size()}, accumulator)), views_(view_model(flat_, table, shape)) {
  zero();
}

void GradientSet::zero() { device_.operations().zero(flat_); }

}  // namespace espalier
