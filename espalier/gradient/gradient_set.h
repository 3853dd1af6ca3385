// One accumulator per parameter: the sum of all contributions of the phases, in float32 (float64 in float64 runs).
//
// During a pass only functions named add_... write the accumulators, through `views()`.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>

#include "espalier/device/device.h"
#include "espalier/gradient/replica_sums.h"
#include "espalier/gradient/scattered_gradients.h"
#include "espalier/model/model_views.h"
#include "espalier/parallel/mesh.h"

namespace espalier {

class GradientSet {
 public:
  // Gradients of the table's trained parameters. Table and mesh must outlive the object, which does not move.
  GradientSet(const ParameterTable& table, const LocalShape& shape, at::ScalarType accumulator,
              Device& device = bound_device(), const Mesh& mesh = mesh_of_one());
  GradientSet(const GradientSet&) = delete;
  GradientSet& operator=(const GradientSet&) = delete;

  void zero();
  // Sums over tp the gradients of parameters of which several ranks computed a part (Shard::partial_gradient). Once a
  // step, after the last backward; every rank of tp calls it.
  void add_shares(Group& tp);
  // Announces this rank's last backward of the step: a layer is summed over replicas as soon as it is done, and must
  // not be used before `finish_sums`.
  void begin_last_backward();
  // Every accumulator <- its sum over the ranks that hold the same weights. All of these ranks call it.
  void finish_sums();
  std::int64_t given_ahead() const { return sums_ ? sums_->given() : 0; }  // bytes in sums begun before `finish_sums`
  ModelViews& views() { return views_; }
  // The guest that sums gradients over ranks around the stops of a pass; null if weights are neither sharded over ranks
  // nor held by several.
  Guest* guest();
  Device& device() const { return device_; }
  const ParameterTable& table() const { return table_; }
  const at::Tensor& flat() const { return flat_; }                                        // in the table's layout
  std::int64_t room_bytes() const { return static_cast<std::int64_t>(rooms_.nbytes()); }  // of sharded units
  // The kept part of a parameter in flat().
  at::Tensor kept(const Parameter& parameter) const;

 private:
  const ParameterTable& table_;
  Device& device_;
  at::Tensor flat_, rooms_;
  std::optional<ScatteredGradients> scattered_;  // if weights are sharded
  std::optional<ReplicaSums> sums_;              // if other ranks hold the same weights
  ModelViews views_;
};

}  // namespace espalier
