// Sizes as people write them: "8GiB", "500 MB", "123456".
#pragma once

#include <cstdint>
#include <string>

namespace espalier {

// Units B, kB, MB, GB, TB (powers of 1000) and KiB, MiB, GiB, TiB (powers of 1024), case ignored; none: bytes.
// Empty: 0. Errors: OptionError naming `option`.
std::int64_t parse_bytes(const std::string& option, const std::string& text);

// "1.50 GiB", "12 B".
std::string bytes_text(std::int64_t bytes);

}  // namespace espalier
