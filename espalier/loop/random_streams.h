// The random streams of a closed loop, derived from --seed, one for each use. Each is a function of the seed and of a
// place in the run, so a run that continues needs no random state.
#pragma once

#include <cstdint>

#include "espalier/base/random.h"

namespace espalier {

enum class Stream : std::uint64_t {
  weights,
  warm_start,
  warm_start_held_out,
  train_prompts,
  held_out_prompts,
  sampling
};

inline Random random_of(std::int64_t seed, Stream stream) {
  return Random(static_cast<std::uint64_t>(seed)).fork(static_cast<std::uint64_t>(stream));
}

}  // namespace espalier
