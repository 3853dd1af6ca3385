// A body without its Content-Encoding.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

namespace espalier::serve {

// Bodies that repeat their prompts compress 26 times; one that compresses far more is refused before it fills memory.
// Errors: InputError for damaged data and for more than `most_bytes`; UnsupportedError for an encoding other than zstd
// and identity.
std::string unpack(std::string body, std::string_view encoding, std::int64_t most_bytes);

}  // namespace espalier::serve
