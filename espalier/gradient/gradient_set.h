// One accumulator per parameter: the sum of everything the phases add, in float32 (float64 in float64 runs).
//
// Only functions named add_... write here, and only through `views()`.
#pragma once

#include <ATen/core/Tensor.h>

#include "espalier/device/device.h"
#include "espalier/model/model_views.h"

namespace espalier {

class GradientSet {
 public:
  GradientSet(const ParameterTable& table, const ModelShape& shape, at::ScalarType accumulator,
              Device& device = bound_device());

  void zero();
  ModelViews& views() { return views_; }
  const at::Tensor& flat() const { return flat_; }  // in the table's layout

 private:
  Device& device_;
  at::Tensor flat_;
  ModelViews views_;
};

}  // namespace espalier
