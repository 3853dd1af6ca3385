#include "espalier/base/units.h"

#include <array>
#include <charconv>
#include <cmath>
#include <cstdio>

#include "espalier/base/error.h"

namespace espalier {
namespace {

struct ByteUnit {
  std::string_view name;  // lower case
  double bytes;
};

constexpr std::array<ByteUnit, 15> kByteUnits = {{
    {"", 1},
    {"b", 1},
    {"kb", 1e3},
    {"mb", 1e6},
    {"gb", 1e9},
    {"tb", 1e12},
    {"k", 0x1p10},
    {"m", 0x1p20},
    {"g", 0x1p30},
    {"t", 0x1p40},
    {"kib", 0x1p10},
    {"mib", 0x1p20},
    {"gib", 0x1p30},
    {"tib", 0x1p40},
    {"bytes", 1},
}};

std::string printed(const char* format, double value) {
  char text[64];
  std::snprintf(text, sizeof text, format, value);
  return text;
}

std::string lower_trimmed(std::string_view text) {
  std::string out;
  for (const char c : text) out += c >= 'A' && c <= 'Z' ? static_cast<char>(c - 'A' + 'a') : c;
  const auto first = out.find_first_not_of(" \t");
  if (first == std::string::npos) return {};
  return out.substr(first, out.find_last_not_of(" \t") - first + 1);
}

}  // namespace

std::int64_t parse_bytes(std::string_view text, std::string_view option) {
  const auto refuse = [&]() -> OptionError {
    return OptionError({std::string(option), "a number of bytes such as 8GiB, 512MB, 1.5g or 123",
                        "\"" + std::string(text) + "\"", "Use B, kB, MB, GB, TB or KiB, MiB, GiB, TiB"});
  };
  const std::string clean = lower_trimmed(text);
  const bool starts_as_number = !clean.empty() && ((clean[0] >= '0' && clean[0] <= '9') || clean[0] == '.');
  if (!starts_as_number) throw refuse();  // from_chars would take "inf", "nan" and a sign
  double number = 0;
  const char* const end = clean.data() + clean.size();
  const auto [rest, error] = std::from_chars(clean.data(), end, number);
  if (error != std::errc()) throw refuse();
  const std::string unit = lower_trimmed({rest, static_cast<std::size_t>(end - rest)});
  for (const ByteUnit& known : kByteUnits) {
    if (unit != known.name) continue;
    const double bytes = std::floor(number * known.bytes);
    if (!(bytes < 0x1p63)) throw refuse();
    return static_cast<std::int64_t>(bytes);
  }
  throw refuse();
}

std::string format_bytes(std::int64_t bytes) {
  constexpr std::array<const char*, 7> kNames = {"B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB"};
  double value = static_cast<double>(bytes);
  std::size_t unit = 0;
  // 1023.995 would print as 1024.00: the next unit takes over there.
  while (std::abs(value) >= (unit == 0 ? 1024.0 : 1023.995) && unit + 1 < kNames.size()) {
    value /= 1024;
    ++unit;
  }
  return printed(unit == 0 ? "%.0f " : "%.2f ", value) + kNames[unit];
}

std::string format_count(std::int64_t count) {
  std::string digits = std::to_string(count);
  const std::ptrdiff_t sign = count < 0 ? 1 : 0;
  for (auto at = static_cast<std::ptrdiff_t>(digits.size()) - 3; at > sign; at -= 3)
    digits.insert(static_cast<std::size_t>(at), 1, ',');
  return digits;
}

std::string format_seconds(double seconds) {
  if (!std::isfinite(seconds)) return "unknown";
  if (seconds < 0) return "-" + format_seconds(-seconds);
  if (seconds < 0.9995e-3) return printed("%.3g us", seconds * 1e6);
  if (seconds < 0.9995) return printed("%.3g ms", seconds * 1e3);
  if (seconds < 99.95) return printed("%.3g s", seconds);
  const auto whole = static_cast<long long>(std::llround(seconds));
  char text[64];
  if (whole < 3600)
    std::snprintf(text, sizeof text, "%lld min %02lld s", whole / 60, whole % 60);
  else
    std::snprintf(text, sizeof text, "%lld h %02lld min", whole / 3600, whole / 60 % 60);
  return text;
}

std::string format_percent(double share) { return printed("%.1f %%", 100 * share); }

}  // namespace espalier
