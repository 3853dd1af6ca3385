// Gradients of weights that ranks divide (--shard full, plan/units.h): each item adds to those of a unit in a room, and
// what it has added is summed over the ranks into the part that each keeps, before the next unit takes the room.
#pragma once

#include <ATen/core/Tensor.h>

#include "espalier/device/device.h"
#include "espalier/model/parameters.h"
#include "espalier/model/unit_keeper.h"
#include "espalier/parallel/mesh.h"

namespace espalier {

class ScatteredGradients final : public UnitKeeper {
 public:
  // `kept` and `rooms` as view_model takes them; behind the rooms is place for the largest part. Table and mesh must
  // outlive the object.
  ScatteredGradients(const ParameterTable& table, at::Tensor kept, at::Tensor rooms, const Mesh& mesh, Device& device);

  void bring(std::int64_t unit) override;
  void let_go(std::int64_t unit) override;

 private:
  const ParameterTable& table_;
  at::Tensor kept_, rooms_;
  at::Tensor first_row_1_;  // the number 0, on the device
  const Mesh& mesh_;
  Device& device_;
};

}  // namespace espalier
