// The field `routed_experts` of a neutral record: [tokens][layers][k] expert numbers that the inference engine chose
// for prompt and response, in order. The last token may be missing, since engines do not run it. null stands for a
// token without a record, and so do zeros in every layer where k > 1; -1 throughout a layer for one not recorded there.
#pragma once

#include <string_view>

#include "espalier/rollout/record_fields.h"
#include "espalier/rollout/rollout.h"

namespace espalier {

// Overwrites `out`; experts stay in the order they came. Errors: InputError for anything but a list of
// lists of lists of equal sizes, and for experts outside [-1, 65535).
void read_recorded_experts(JsonValue value, const RecordPlace& place, std::string_view field, RecordedExperts& out);

}  // namespace espalier
