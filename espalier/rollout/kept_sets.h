// The sets of tokens that a sampler could draw from (KeptSets of rollout.h).
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "espalier/options/choices.h"
#include "espalier/rollout/rollout.h"

namespace espalier {

// Adds the set of the next response token: `ids` in any order, repeated ones count once. Empty: no set.
void add_kept_set(KeptSets& sets, std::span<const std::int32_t> ids);

// True if token `id` can be drawn at `position`.
bool keeps(const KeptSets& sets, std::size_t position, std::int32_t id);

// Takes the sets away where they are to be ignored. Returns a note for the user, "" if no record has sets.
std::string settle_kept_sets(std::vector<Rollout>& rollouts, KeptSetsUse use);

// The sets as JSON, the value of the field `kept_ids` (kept_sets_field.h).
std::string kept_sets_json(const KeptSets& sets);

}  // namespace espalier
