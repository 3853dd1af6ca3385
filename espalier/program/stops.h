// The stops of a pass: embedding, layers, final norm and head, each of them where this rank's stage of pp has it.
//
// One list says in which order a pass goes through them. Executor and sampler walk it (model/guest.h), with rows and
// without, and the forecast of bytes reads it: the collectives around the stops run in this order on every rank.
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
  std::int64_t unit = 0;  // of the parameters there (shape/units.h); of a layer its number on this rank
  bool reads_weights = true;
  bool adds_gradients = false;

  bool is_layer() const { return kind == Kind::layer; }
};

// All stops but the head. A backward ends above the layers and the embedding whose gradients nobody needs.
std::vector<Stop> decoder_stops(const LocalShape& local, Pass pass);

// When the head computes its gradient: never, in the forward that scores, or in the backward, when whole rollouts are
// scored.
enum class HeadGradient : std::uint8_t { none, in_forward, in_backward };

// The head's stop: behind the others of a forward, before those of a backward. Nothing on other stages of pp than the
// last, and in a backward that does not compute the head's gradient.
std::optional<Stop> head_stop(const LocalShape& local, Pass pass, HeadGradient when);

}  // namespace espalier
