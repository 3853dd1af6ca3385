// The experts and routers of a config.json.
#pragma once

#include "espalier/shape/config_members.h"
#include "espalier/shape/model_families.h"

namespace espalier {

// Sets the members of `shape` that concern experts, their routers and the shared expert, by the row of its family.
// shape.layers and shape.expert_layer [layers] must be set. Errors: InputError for an absent or absurd member;
// UnsupportedError for routing that depends on other tokens, is random, or is not the family's.
void read_experts(const Members& config, const Family& family, ModelShape& shape);

}  // namespace espalier
