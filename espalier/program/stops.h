// The stops of a pass that this rank's stage of pp has: embedding, layers, final norm and head.
//
// One list defines their order. The executor and the sampler walk it (model/guest.h), with and without rows, and the
// byte forecast reads it: the collectives around the stops run in this order on every rank.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "espalier/program/program.h"
#include "espalier/shape/local_shape.h"

namespace espalier {

struct Stop {
  enum class Kind : std::uint8_t { embedding, layer, final_norm, head };

  Kind kind = Kind::layer;
  Pass pass = Pass::forward;
  std::int64_t unit = 0;  // the unit of its parameters (shape/units.h); for a layer, its index on this rank
  bool reads_weights = true;
  bool adds_gradients = false;

  bool is_layer() const { return kind == Kind::layer; }
};

// All stops except the head. A backward leaves out the layers and the embedding below the first trained parameter.
std::vector<Stop> decoder_stops(const LocalShape& local, Pass pass);

// When the head computes its gradient: never, in the scoring forward, or, if it needs whole rollouts, in the
// backward.
enum class HeadGradient : std::uint8_t { none, in_forward, in_backward };

// The head's stop: after all others in a forward, before all others in a backward. Empty on stages of pp other than the
// last, and in a backward that does not compute the head's gradient.
std::optional<Stop> head_stop(const LocalShape& local, Pass pass, HeadGradient when);

}  // namespace espalier
