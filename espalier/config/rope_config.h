// Rotary positions as a config.json states them.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "espalier/config/reading.h"

namespace espalier {

// Fills the members that say how queries and keys rotate. Errors: InputError, UnsupportedError for types of
// scaling that are not in RopeType.
void read_rope(const Members& config, const Family& family, Reading& reading);

// The scaling of layers with longrope; none: no layer has it.
std::optional<RopeScaling> longrope_of(const ModelShape& shape);

// A note that all rows of a step rotate by the long factors of longrope, because its longest rollout has `longest`
// tokens; "" if they do not. `what`: the note's subject, "rollouts.jsonl:3 has 5000 tokens".
std::string long_factors_note(const ModelShape& shape, std::int64_t longest, const std::string& what);

// This note and one that `longest` tokens are more than the model's positions, as far as they apply.
std::vector<std::string> position_notes(const ModelShape& shape, std::int64_t longest, const std::string& what);

}  // namespace espalier
