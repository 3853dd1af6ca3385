// One accumulator per parameter: the sum of everything the phases add, in float32 (float64 in float64 runs).
//
// Only functions named add_... write here, and only through `views()`.
#pragma once

#include <ATen/core/Tensor.h>

#include "espalier/device/device.h"
#include "espalier/model/model_views.h"
#include "espalier/parallel/group.h"

namespace espalier {

class GradientSet {
 public:
  // The table must outlive the object.
  GradientSet(const ParameterTable& table, const LocalShape& shape, at::ScalarType accumulator,
              Device& device = bound_device());

  void zero();
  // Where several ranks hold a parameter and each has computed a share of its gradient (Shard::partial_gradient), makes
  // it the sum. Once a step, after the last backward; every rank of tp calls it.
  void add_shares(Group& tp);
  ModelViews& views() { return views_; }
  Device& device() const { return device_; }
  const ParameterTable& table() const { return table_; }
  const at::Tensor& flat() const { return flat_; }  // in the table's layout

 private:
  const ParameterTable& table_;
  Device& device_;
  at::Tensor flat_;
  ModelViews views_;
};

}  // namespace espalier
