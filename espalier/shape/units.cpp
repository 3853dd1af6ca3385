#include "espalier/shape/units.h"

#include <algorithm>

#include "espalier/base/error.h"

namespace espalier {
namespace {

std::int64_t elements_of(const ParameterShape& parameter, const Shard& shard) {
  std::int64_t count = 1;
  for (const Side& side : parameter.sides) count *= side.size;
  return shard.dim < 0 ? count : count / shard.whole * shard.local;
}

std::int64_t unit_of(const ParameterShape& parameter, const LocalShape& shape) {
  if (parameter.layer >= 0) return parameter.layer - shape.layers().begin;
  const OuterParameters outer = outer_parameters(shape.whole());
  if (of_layer_inputs(outer, parameter.name)) return Unit::kEmbedding;  // the look-up reads them
  return parameter.name.starts_with(outer.embedding.name)    ? Unit::kEmbedding
         : parameter.name.starts_with(outer.final_norm.name) ? Unit::kFinalNorm
                                                             : Unit::kHead;
}

// Sets the number of ranks that a unit is sharded over, and this rank's number in the order of their group.
void divide(Unit& unit, const Degrees& d, const Place& place) {
  unit.ranks = d.dp * d.cp, unit.rank = place.dp * d.cp + place.cp;
  if (unit.experts) unit.ranks = unit.ranks * d.tp / d.ep, unit.rank = (unit.rank * d.tp + place.tp) / d.ep;
}

// Parts, rooms and sums, one after another.
void place_units(Units& units, const LocalShape& shape) {
  std::int64_t of_layer = 0, of_ends = 0, of_norm = 0, layers = 0;
  std::int64_t room = 0, sum = 0;  // ends of a layer's units so far
  for (std::size_t i = 0; i < units.all.size(); ++i) {
    Unit& unit = units.all[i];
    if (i == 0 || units.all[i - 1].what != unit.what) room = sum = 0;
    divide(unit, shape.degrees(), shape.place());
    unit.place = units.kept;
    units.kept += unit.part();
    if (!unit.sharded()) continue;
    unit.room = room, unit.sum = sum;
    room += unit.whole(), sum += unit.part();
    units.sums = std::max(units.sums, sum);
    if (unit.what == Unit::kFinalNorm) {
      of_norm = room;
    } else if (unit.what < 0) {
      of_ends = std::max(of_ends, room);
    } else {
      of_layer = std::max(of_layer, room);
      layers = unit.what + 1;
    }
  }
  const std::int64_t of_layers = std::min<std::int64_t>(layers, 2) * of_layer;
  for (Unit& unit : units.all)
    unit.room += unit.what >= 0                  ? unit.what % 2 * of_layer
                 : unit.what == Unit::kFinalNorm ? of_layers + of_ends
                                                 : of_layers;
  units.rooms = of_layers + of_ends + of_norm;
}

}  // namespace

Kept Unit::kept(std::int64_t first, std::int64_t elements, std::int64_t nth) const {
  const std::int64_t from = begin + nth * part();
  const std::int64_t here = std::max(from, first), end = std::min(from + part(), first + elements);
  if (end <= here) return {};
  return {here - first, end - here, place + here - from};
}

const Unit& Units::at(std::int64_t element) const {
  return *std::prev(std::ranges::upper_bound(all, element, {}, &Unit::begin));
}

Units units_of(const LocalShape& shape, Parameters which) {
  Units units;
  std::int64_t size = 0;
  for_each_parameter(shape.whole(), [&](const ParameterShape& parameter) {
    const std::optional<Shard> shard = shape.shard(parameter);
    if (!shard || !belongs(parameter, which)) return;
    const std::int64_t what = unit_of(parameter, shape), count = elements_of(parameter, *shard);
    const bool experts = shard->of_expert && shape.degrees().ep > 1;
    if (units.all.empty() || units.all.back().what != what || units.all.back().experts != experts)
      units.all.push_back({.what = what, .layer = parameter.layer, .experts = experts, .begin = size});
    units.all.back().count += count;
    size += count;
  });
  place_units(units, shape);
  return units;
}

std::string name_of(const Unit& unit) {
  if (unit.what >= 0) return text_of(unit.experts ? "experts of layer " : "layer ", unit.layer);
  return unit.what == Unit::kEmbedding ? "embedding" : unit.what == Unit::kFinalNorm ? "final norm" : "head";
}

std::int64_t head_unit(const ModelShape& shape) { return shape.tied_head ? Unit::kEmbedding : Unit::kHead; }

}  // namespace espalier
