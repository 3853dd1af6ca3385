#include "espalier/model/stage_link.h"

namespace espalier {

void StageLink::enter(const Stop& stop) {
  const LocalShape& local = decoder_.local();
  Group& pp = decoder_.mesh().pp;
  const bool forward = stop.pass == Pass::forward;
  if (!stop.is_layer() || (forward ? local.is_first_stage() : local.is_last_stage())) return;
  if (stop.unit == (forward ? 0 : decoder_.shape().layers() - 1))
    pp.receive(stream_TM_, forward ? pp.rank() - 1 : pp.rank() + 1);
}

void StageLink::leave(const Stop& stop) {
  const LocalShape& local = decoder_.local();
  Group& pp = decoder_.mesh().pp;
  const bool forward = stop.pass == Pass::forward;
  if (!stop.is_layer() || (forward ? local.is_last_stage() : local.is_first_stage())) return;
  if (!forward && !decoder_.shape().trained.input) return;
  if (stop.unit == (forward ? decoder_.shape().layers() - 1 : decoder_.first_layer()))
    pp.send(stream_TM_, forward ? pp.rank() + 1 : pp.rank() - 1);
}

}  // namespace espalier
