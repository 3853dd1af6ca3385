// Weights that ranks divide (--shard full, shape/units.h), brought together unit by unit where somebody computes with
// them. The next unit gathered into a buffer overwrites the last; layers have two, so that one arrives
// while the one before it computes.
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
  // The buffers as view_model takes them. Their tables and the mesh must outlive the object.
  GatheredWeights(std::vector<FlatParameters> buffers, const Mesh& mesh) : buffers_(std::move(buffers)), mesh_(mesh) {}

  // A layer's weights begin to come while the stop before it computes.
  void ahead(const Stop& stop) override;
  // The views of the stop's weights hold what all ranks have of it, until another unit takes its room.
  void enter(const Stop& stop) override;

 private:
  std::vector<Pending> start(std::int64_t unit);

  std::vector<FlatParameters> buffers_;
  const Mesh& mesh_;
  std::int64_t asked_ = 0;       // the unit that is coming, if any is
  std::vector<Pending> coming_;  // what it consists of
};

}  // namespace espalier
