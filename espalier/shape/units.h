// Units: the parts of a model that are sharded under --shard full and gathered for use. Each layer is a unit, and so
// are the embedding, the final norm and the head. With ep the experts of a layer are a separate unit.
//
// Each of the n ranks that would hold copies of a unit keeps ceil(elements / n) elements: rank r from r
// ceil(elements / n) on, the last ones with padding (0). Weights, gradients, masters and moments are sharded alike;
// a rank's flat buffers hold its parts of all units end to end. A unit is gathered in a room. Layers use two rooms
// in turn, so that the next layer is gathered, and the previous layer's gradient reduced, while one is in use.
// Embedding and head take turns in a third room; the final norm has a fourth. A unit on a single rank stays in
// place.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "espalier/shape/local_shape.h"

namespace espalier {

// Elements [first, first + count) of a parameter, which lie at `place` of a flat buffer.
struct Kept {
  std::int64_t first = 0, count = 0, place = 0;
};

struct Unit {
  // Beside the layers of a rank, which are numbered from 0.
  static constexpr std::int64_t kEmbedding = -1, kFinalNorm = -2, kHead = -3;

  std::int64_t what = kEmbedding;
  std::int64_t layer = 0;             // in the whole model, of a layer
  bool experts = false;               // sharded over Axis::expert_replicas, all others over Axis::replicas
  std::int64_t begin = 0, count = 0;  // of the elements of this rank's parameters, in their order
  std::int64_t ranks = 1, rank = 0;   // the number of its shards, and this rank's
  std::int64_t place = 0;             // of the part, in flat buffers of what this rank keeps
  std::int64_t room = 0;              // of the whole, in the buffer of rooms
  std::int64_t sum = 0;               // of the part of a sum of gradients, in a buffer for the sums of one layer
  bool sharded() const { return ranks > 1; }
  std::int64_t part() const { return (count + ranks - 1) / ranks; }
  std::int64_t whole() const { return part() * ranks; }  // with padding
  // The part of a parameter's elements [first, first + elements) that the nth of the sharding ranks keeps.
  Kept kept(std::int64_t first, std::int64_t elements, std::int64_t nth) const;
};

std::string name_of(const Unit& unit);  // "layer 3", "experts of layer 3", "embedding"

struct Units {
  std::vector<Unit> all;   // in the order of the parameters
  std::int64_t kept = 0;   // elements of the parts of this rank
  std::int64_t rooms = 0;  // elements of all rooms
  std::int64_t sums = 0;   // elements of the parts of one layer, or of another unit, at most

  const Unit& at(std::int64_t element) const;  // the unit that has this element of the rank's parameters
};
// Each kind of parameters (trained, held, ...) is sharded separately and has its own units.
Units units_of(const LocalShape& shape, Parameters which = Parameters::all);

// The unit that the head reads: the embedding where they are tied.
std::int64_t head_unit(const ModelShape& shape);

}  // namespace espalier
