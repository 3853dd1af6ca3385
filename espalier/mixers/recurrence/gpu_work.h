// Bytes that a GPU's recurrent layers take beside the arena (ops/cuda/delta_rule_backward.cu, and
// delta_chunks.cu in bfloat16).
#pragma once

#include <cstdint>

#include "espalier/base/dtype.h"
#include "espalier/mixers/recurrence/shape.h"

namespace espalier {

// True if the rows run in chunks in bfloat16 (ops/cuda/delta_chunks.h).
bool fits_chunks(const RecurrenceShape& shape);

// The most at a time for `rows` rows in runs of any lengths, in chunks: tiles of up to 2 GiB, or of one key head, and
// with gradients sums for every 64 rows.
std::int64_t chunk_scratch_bytes(const RecurrenceShape& shape, std::int64_t rows, bool gradients);
// The same row by row, with gradients alone: the state before every 64th row of a run, and for each of the up to 16
// runs of a launch its key heads' matrices of 64 rows and its parts of the sums.
std::int64_t row_scratch_bytes(const RecurrenceShape& shape, std::int64_t rows, DType dtype, bool gradients);
// The larger of the two where rows may run in chunks, as a plan counts, since a device may fail the trial of chunks
// after the plan was made.
std::int64_t recurrent_scratch_bytes(const RecurrenceShape& shape, std::int64_t rows, DType dtype, bool gradients);

}  // namespace espalier
