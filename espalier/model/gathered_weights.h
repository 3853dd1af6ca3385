// Gathers sharded weights (--shard full, shape/units.h) unit by unit before they are used. A unit gathered into a
// room overwrites the previous one; layers have two rooms, so that one layer arrives while the previous one
// computes.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include "espalier/model/guest.h"
#include "espalier/model/model_views.h"
#include "espalier/parallel/mesh.h"

namespace espalier {

// The group of the ranks that shard a unit.
inline Group& holders_of(const Unit& unit, const Mesh& mesh) {
  return unit.experts ? mesh.expert_replicas : mesh.replicas;
}

class GatheredWeights final : public Guest {
 public:
  // `buffers` as for view_model. Their tables and the mesh must outlive the object.
  GatheredWeights(std::vector<FlatParameters> buffers, const Mesh& mesh) : buffers_(std::move(buffers)), mesh_(mesh) {}

  // Starts to gather a layer's weights while the previous stop computes.
  void ahead(const Stop& stop) override;
  // Afterwards the views of the stop's weights hold the whole unit, until another unit takes its room.
  void enter(const Stop& stop) override;

 private:
  std::vector<Pending> start(std::int64_t unit);

  std::vector<FlatParameters> buffers_;
  const Mesh& mesh_;
  std::int64_t asked_ = 0;       // the unit being gathered, if any
  std::vector<Pending> coming_;  // its collectives
};

}  // namespace espalier
