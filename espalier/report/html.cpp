#include "espalier/report/html.h"

#include <cmath>
#include <cstdio>

#include "espalier/base/units.h"

namespace espalier {
namespace {

std::string printed(const char* format, double value) {
  char text[64];
  std::snprintf(text, sizeof text, format, value);
  return text;
}

}  // namespace

std::string escaped(std::string_view text) {
  std::string out;
  out.reserve(text.size());
  for (const char c : text) {
    const auto byte = static_cast<unsigned char>(c);
    if (c == '&')
      out += "&amp;";
    else if (c == '<')
      out += "&lt;";
    else if (c == '>')
      out += "&gt;";
    else if (c == '"')
      out += "&quot;";
    else if (c == '\'')
      out += "&#39;";
    else if ((byte < 32 && c != '\n' && c != '\t') || byte == 127)
      out += "&#xfffd;";
    else
      out += c;
  }
  return out;
}

std::string shown(double value, Unit unit) {
  if (!(std::abs(value) < 1e15)) return printed("%.4g", value);  // more than integers can hold
  switch (unit) {
    case Unit::percent:
      return format_percent(value);
    case Unit::seconds:
      return format_seconds(value);
    case Unit::count:
      return format_count(std::llround(value));
    case Unit::bytes:
      return format_bytes(std::llround(value));
    case Unit::number:
      break;
  }
  return printed("%.4g", value);
}

std::string coordinate(double value) {
  std::string text = printed("%.2f", value);
  text.erase(text.find_last_not_of('0') + 1);
  if (text.back() == '.') text.pop_back();
  return text == "-0" ? "0" : text;
}

}  // namespace espalier
