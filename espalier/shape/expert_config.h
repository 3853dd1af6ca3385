// The experts and routers of a config.json.
#pragma once

#include "espalier/shape/config_members.h"
#include "espalier/shape/model_families.h"

namespace espalier {

// Sets the members of `shape` that concern experts, its routers and the shared expert, by the row of its family.
// shape.layers and shape.expert_layer [layers] are there. Errors: InputError for an absent or absurd member,
// UnsupportedError for routing that looks at more than one token, that is random, or that the family does not have.
void read_experts(const Members& config, const Family& family, ModelShape& shape);

}  // namespace espalier
