// The sampler's interface between the turns of a trajectory: a turn's tokens go out, the tokens of an observation or
// the end of the trajectory come back.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

namespace espalier {

struct EndedTurn {
  std::int64_t response = 0;      // index into the results
  std::vector<std::int32_t> ids;  // of this turn, the stop token included; at least one
  bool last = false;              // no turn can follow it
};

struct NextTurn {
  bool done = false;  // the trajectory has ended; observation_ids are not used
  std::vector<std::int32_t> observation_ids;
  // All tokens of the trajectory up to its next turn, rendered again, in place of observation_ids.
  std::optional<std::vector<std::int32_t>> history;
};

class Turns {
 public:
  virtual ~Turns() = default;

  // Starts to ask for the answers to some turns, and returns at once.
  virtual void ask(std::vector<EndedTurn> turns) = 0;
  // Waits for the answers to the last request, in order. Errors: InputError.
  virtual std::vector<NextTurn> answers() = 0;
};

}  // namespace espalier
