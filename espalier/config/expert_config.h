// The experts and routers of a config.json.
#pragma once

#include "espalier/config/reading.h"

namespace espalier {

// Sets the members of the shape that concern experts, their routers and the shared expert, by the row of its family,
// and which layers have them. The layers must be there. Errors: InputError for an absent or absurd member;
// UnsupportedError for routing that depends on other tokens, is random, or is not the family's.
void read_experts(const Members& config, const Family& family, Reading& reading);

}  // namespace espalier
