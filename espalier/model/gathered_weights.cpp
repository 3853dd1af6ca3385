#include "espalier/model/gathered_weights.h"

#include <utility>

namespace espalier {

std::vector<Pending> GatheredWeights::start(std::int64_t what) {
  std::vector<Pending> started;
  for (const FlatParameters& buffer : buffers_)
    for (const Unit& unit : buffer.table.units().all)
      if (unit.what == what && unit.sharded())
        started.push_back(holders_of(unit, mesh_)
                              .start_gather(buffer.flat.narrow(0, unit.place, unit.part()),
                                            buffer.rooms.narrow(0, unit.room, unit.whole()), name_of(unit)));
  return started;
}

void GatheredWeights::ahead(const Stop& stop) {
  if (stop.is_layer() && stop.reads_weights) asked_ = stop.unit, coming_ = start(stop.unit);
}

void GatheredWeights::enter(const Stop& stop) {
  if (!stop.reads_weights) return;
  const bool comes = !coming_.empty() && asked_ == stop.unit;
  std::vector<Pending> gathers = comes ? std::exchange(coming_, {}) : start(stop.unit);
  for (Pending& gather : gathers) gather.wait();
}

}  // namespace espalier
