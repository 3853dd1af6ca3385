#include "espalier/forecast/communicators.h"

#include <algorithm>
#include <set>
#include <utility>

namespace espalier {

std::int64_t used_communicators(const Degrees& degrees, bool experts, bool states) {
  std::set<GroupKey> groups;
  for (const Axis axis :
       {Axis::world, Axis::tp, Axis::cp, Axis::pp, Axis::dp, Axis::ep, Axis::replicas, Axis::expert_replicas}) {
    if (axis == Axis::expert_replicas && !experts) continue;  // their gradients alone are summed there
    GroupKey key = group_along(axis, 0, degrees);
    if (key.ranks.size() > 1) groups.insert(std::move(key));
  }
  // Gradients of rows go to the stage before, and gradients of states to the cp rank before.
  const std::int64_t down = (degrees.pp > 1 ? 1 : 0) + (states && degrees.cp > 1 ? 1 : 0);
  return static_cast<std::int64_t>(groups.size()) + down;
}

std::int64_t communicator_bytes(const Degrees& degrees, const ModelShape& shape) {
  const bool states =
      std::ranges::any_of(shape.layer, [](const LayerShape& layer) { return layer.mixer->state() > 0; });
  return used_communicators(degrees, shape.experts > 0, states) * kNcclChannels * kNcclChannelBytes;
}

}  // namespace espalier
