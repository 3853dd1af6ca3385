// Bytes that a GPU's backward of recurrent layers takes beside the arena (ops/cuda/delta_rule_backward.cu).
#pragma once

#include <cstdint>

#include "espalier/mixers/recurrence/shape.h"

namespace espalier {

// The most at a time for `rows` rows in runs of any lengths, `number_bytes` a number: the state before every 64th row
// of a run, and for each of the up to 16 runs of a launch its key heads' matrices of 64 rows and its parts of the sums.
std::int64_t recurrent_scratch_bytes(const RecurrenceShape& shape, std::int64_t rows, std::int64_t number_bytes);

}  // namespace espalier
