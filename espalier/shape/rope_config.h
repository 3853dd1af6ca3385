// Rotary positions as a config.json states them.
#pragma once

#include "espalier/shape/config_members.h"
#include "espalier/shape/model_families.h"

namespace espalier {

// Fills the members of `shape` that say how queries and keys rotate. Errors: InputError, UnsupportedError for types of
// scaling that are not in RopeType.
void read_rope(const Members& config, const Family& family, ModelShape& shape);

// Names the factors of longrope where rollouts of at most `longest` tokens use the long ones; "" otherwise. `what`: the
// longest of them, "rollouts.jsonl:3 has 5000 tokens".
std::string long_factors_note(const ModelShape& shape, std::int64_t longest, const std::string& what);

}  // namespace espalier
