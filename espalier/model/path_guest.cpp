#include "espalier/model/path_guest.h"

namespace espalier {

// It adds nothing, which is a contribution, too.
void JoinedPath::enter(const Stop& stop) {
  PathGuest::enter(stop);
  if (stop.is_layer() && stop.pass == Pass::backward) path_.count_contribution(stop.unit, rows_above_);
}

}  // namespace espalier
