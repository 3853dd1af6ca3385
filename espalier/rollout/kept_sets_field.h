// The field `kept_ids` of a neutral record: for each response token the ids that the sampler could draw from after
// top-k and top-p, in any order, or null, which means the whole vocabulary.
#pragma once

#include <cstdint>
#include <string_view>
#include <vector>

#include "espalier/rollout/record_fields.h"
#include "espalier/rollout/rollout.h"

namespace espalier {

struct KeptIds {
  KeptSets sets;
  std::vector<std::size_t> empty;  // tokens with an empty list, which no token can be drawn from
};

// Overwrites `out`. Errors: InputError for anything but a list of lists of token ids and nulls.
void read_kept_ids(JsonValue value, const RecordPlace& place, std::string_view field, std::int64_t vocabulary,
                   KeptIds& out);

// Gives the rollout the sets of its response tokens. Tokens without loss lose a set that they are not in. Errors:
// InputError for another number of entries than response tokens, and for a token with loss that is not in its set.
void give_kept_sets(KeptIds&& kept, const RecordPlace& place, std::string_view field, Rollout& rollout);

}  // namespace espalier
