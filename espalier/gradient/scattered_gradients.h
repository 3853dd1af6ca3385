// Gradients of sharded weights (--shard full, shape/units.h): each item adds to a unit's gradients in a room. They are
// reduced over the ranks into the part of each rank while the next unit computes.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include "espalier/device/device.h"
#include "espalier/model/guest.h"
#include "espalier/model/parameters.h"
#include "espalier/parallel/mesh.h"

namespace espalier {

class ScatteredGradients final : public Guest {
 public:
  // `kept` and `rooms` as for view_model; the sums of a layer follow the rooms. Table and mesh must outlive the
  // object.
  ScatteredGradients(const ParameterTable& table, at::Tensor kept, at::Tensor rooms, const Mesh& mesh, Device& device);

  // The views of the stop's gradients hold 0 from now on.
  void enter(const Stop& stop) override;
  // Starts to reduce the gradients in the views over the ranks. The next leave, or finish, adds the sums to each rank's
  // part.
  void leave(const Stop& stop) override;
  // Waits until all released gradients are reduced and added.
  void finish();

 private:
  struct Leaving {
    const Unit* unit;
    Pending sum;
  };

  at::Tensor sum_of(const Unit& unit) const { return rooms_.narrow(0, table_.units().rooms + unit.sum, unit.part()); }

  const ParameterTable& table_;
  at::Tensor kept_, rooms_;
  at::Tensor first_row_1_;  // the number 0, on the device
  const Mesh& mesh_;
  Device& device_;
  std::vector<Leaving> leaving_;  // units released last
};

}  // namespace espalier
