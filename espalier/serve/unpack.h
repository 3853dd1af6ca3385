// A body without its Content-Encoding.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

namespace espalier::serve {

// The text of a body; `room` holds it where it had to be decompressed. Bodies that repeat their prompts compress 26
// times; one that compresses far more is refused before it fills memory. Errors: InputError for damaged data and for
// more than `most_bytes`; UnsupportedError for an encoding other than zstd and identity.
std::string_view unpack(std::string_view body, std::string_view encoding, std::int64_t most_bytes, std::string& room);

}  // namespace espalier::serve
