#include "espalier/forecast/communicators.h"

#include <set>
#include <utility>

namespace espalier {

std::int64_t used_communicators(const Degrees& degrees, bool experts) {
  std::set<GroupKey> groups;
  for (const Axis axis :
       {Axis::world, Axis::tp, Axis::cp, Axis::pp, Axis::dp, Axis::ep, Axis::replicas, Axis::expert_replicas}) {
    if (axis == Axis::expert_replicas && !experts) continue;  // their gradients alone are summed there
    GroupKey key = group_along(axis, 0, degrees);
    if (key.ranks.size() > 1) groups.insert(std::move(key));
  }
  const std::int64_t down = degrees.pp > 1 ? 1 : 0;  // gradients of rows go to the stage before
  return static_cast<std::int64_t>(groups.size()) + down;
}

}  // namespace espalier
