// Quantities as people write and read them: bytes, counts, seconds, shares.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

namespace espalier {

// Bytes from "123", "512MB", "8GiB", "1.5g" (any case, a space before the unit allowed). kB, MB, GB, TB are powers of
// 1000; KiB, MiB, GiB, TiB and the single letters k, m, g, t are powers of 1024. Fractions of a byte are dropped.
// OptionError, naming `option`, for anything else: no number, negative, unknown unit, 2^63 bytes or more.
std::int64_t parse_bytes(std::string_view text, std::string_view option = {});

std::string format_bytes(std::int64_t bytes);  // "512 B", "1.50 KiB", "8.00 GiB"
std::string format_count(std::int64_t count);  // "1,234,567"
std::string format_seconds(double seconds);    // "12.3 us", "4.56 ms", "7.89 s", "12 min 03 s", "2 h 05 min"
std::string format_percent(double share);      // share 0.1234 -> "12.3 %"

}  // namespace espalier
