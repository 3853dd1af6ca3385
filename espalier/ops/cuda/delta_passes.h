// Passes of the chunked delta rule over key heads (delta_chunks.h).
#pragma once

#include <cstdint>

namespace espalier::cuda {

// A pass takes as many key heads as have room in this many bytes, at least one: kMostPassBytes. Tests set fewer, so
// that small problems take several passes.
void set_pass_bytes(std::int64_t bytes);

}  // namespace espalier::cuda
