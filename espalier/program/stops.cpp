#include "espalier/program/stops.h"

#include "espalier/shape/units.h"

namespace espalier {
namespace {

std::vector<Stop> forward_stops(const LocalShape& local) {
  std::vector<Stop> stops;
  if (local.is_first_stage()) stops.push_back({Stop::Kind::embedding, Pass::forward, Unit::kEmbedding});
  for (std::int64_t layer = 0; layer < local.own().layers(); ++layer)
    stops.push_back({Stop::Kind::layer, Pass::forward, layer});
  if (local.is_last_stage()) stops.push_back({Stop::Kind::final_norm, Pass::forward, Unit::kFinalNorm});
  return stops;
}

std::vector<Stop> backward_stops(const LocalShape& local) {
  const TrainedParameters& trained = local.own().trained;
  std::vector<Stop> stops;
  const auto add = [&](Stop::Kind kind, std::int64_t unit, bool reads_weights) {
    stops.push_back({kind, Pass::backward, unit, reads_weights, true});
  };
  if (local.is_last_stage()) add(Stop::Kind::final_norm, Unit::kFinalNorm, true);
  for (std::int64_t layer = local.own().layers() - 1; layer >= trained.first_layer; --layer)
    add(Stop::Kind::layer, layer, true);
  if (local.is_first_stage() && trained.input) add(Stop::Kind::embedding, Unit::kEmbedding, false);
  return stops;
}

}  // namespace

std::vector<Stop> decoder_stops(const LocalShape& local, Pass pass) {
  return pass == Pass::forward ? forward_stops(local) : backward_stops(local);
}

std::optional<Stop> head_stop(const LocalShape& local, Pass pass, HeadGradient when) {
  const bool backward = pass == Pass::backward;
  if (!local.is_last_stage() || (backward && when != HeadGradient::in_backward)) return {};
  return Stop{Stop::Kind::head, pass, head_unit(local.whole()), true, backward || when == HeadGradient::in_forward};
}

}  // namespace espalier
