#include "espalier/model/gathered_weights.h"

namespace espalier {

void GatheredWeights::bring(std::int64_t what) {
  for (const Unit& unit : table_.units().all)
    if (unit.what == what && unit.divided())
      holders_of(unit, mesh_)
          .gather(kept_.narrow(0, unit.place, unit.part()), rooms_.narrow(0, unit.room, unit.whole()));
}

}  // namespace espalier
