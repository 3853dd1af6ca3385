// Reading and writing of sizes.
#include "espalier/plan/byte_size.h"

#include <algorithm>
#include <cctype>
#include <cmath>
#include <cstdio>
#include <cstdlib>

#include "espalier/base/error.h"

namespace espalier {

std::int64_t parse_bytes(const std::string& option, const std::string& text) {
  if (text.empty()) return 0;
  const auto fail = [&] { return OptionError({option, "a size such as 8GiB, 500MB or 123456", "'" + text + "'", ""}); };
  if (!std::isdigit(static_cast<unsigned char>(text[0]))) throw fail();
  const std::size_t digits = std::min(text.find_first_not_of("0123456789."), text.size());
  const double number = std::strtod(text.substr(0, digits).c_str(), nullptr);
  std::string unit;
  for (char c : text.substr(digits))
    if (c != ' ') unit += static_cast<char>(std::tolower(static_cast<unsigned char>(c)));
  double scale = 1;
  if (!unit.empty() && unit != "b") {
    const std::size_t power = std::string("kmgt").find(unit[0]);
    const std::string end = unit.substr(1);
    if (power == std::string::npos || (end != "b" && end != "ib" && !end.empty())) throw fail();
    scale = std::pow(end == "b" ? 1000.0 : 1024.0, static_cast<double>(power + 1));
  }
  const double bytes = number * scale;
  if (!(bytes >= 1 && bytes < 9e18)) throw fail();
  return static_cast<std::int64_t>(bytes);
}

std::string bytes_text(std::int64_t bytes) {
  const char* units[] = {"B", "KiB", "MiB", "GiB", "TiB", "PiB"};
  double value = static_cast<double>(bytes);
  int unit = 0;
  while (value >= 1024 && unit < 5) value /= 1024, ++unit;
  char text[32];
  std::snprintf(text, sizeof text, unit == 0 ? "%.0f %s" : "%.2f %s", value, units[unit]);
  return text;
}

}  // namespace espalier
