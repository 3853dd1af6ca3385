#include "espalier/options/option_value.h"

#include <charconv>
#include <cmath>
#include <limits>

#include "espalier/base/error.h"
#include "espalier/base/units.h"
#include "espalier/options/nearest_option.h"
#include "espalier/options/values_elsewhere.h"

namespace espalier {
namespace {

// "[0, 1)", "(-inf, inf)": which numbers are allowed. An open end at infinity excludes infinity itself.
struct Interval {
  double low = 0, high = 0;
  bool low_open = false, high_open = false;

  bool holds(double value) const {
    return (low_open ? value > low : value >= low) && (high_open ? value < high : value <= high);
  }
};

double bound_of(std::string_view text) {
  if (text == "inf") return std::numeric_limits<double>::infinity();
  if (text == "-inf") return -std::numeric_limits<double>::infinity();
  double value = 0;
  const auto result = std::from_chars(text.data(), text.data() + text.size(), value);
  ESPALIER_INTERNAL(result.ec == std::errc() && result.ptr == text.data() + text.size(), "range bound ", text);
  return value;
}

Interval interval_of(std::string_view range) {
  const std::size_t comma = range.find(", ");
  ESPALIER_INTERNAL(range.size() > 5 && comma != range.npos, "range ", range);
  return {bound_of(range.substr(1, comma - 1)), bound_of(range.substr(comma + 2, range.size() - comma - 3)),
          range.front() == '(', range.back() == ')'};
}

std::vector<std::string> choices_of(std::string_view range) {
  std::vector<std::string> choices;
  for (std::size_t begin = 0; begin <= range.size();) {
    const std::size_t end = std::min(range.find('|', begin), range.size());
    choices.emplace_back(range.substr(begin, end - begin));
    begin = end + 1;
  }
  return choices;
}

constexpr std::string_view kDeviceOfTests = "emulate";  // accepted, but not documented

std::string quoted(const std::string& text) { return text.empty() ? "nothing" : '"' + text + '"'; }

void check_interval(const OptionRow& row, double value, const std::string& text, const std::string& where) {
  if (!interval_of(row.range).holds(value)) throw OptionError({where, description_of(row), quoted(text), ""});
}

void check_choice(const OptionRow& row, const std::string& value, const std::string& where) {
  if (std::string_view(row.name) == "device" && value == kDeviceOfTests) return;
  const std::vector<std::string> choices = choices_of(row.range);
  for (const std::string& choice : choices)
    if (choice == value) return;
  std::string remedy = remedy_elsewhere(row, value);
  if (remedy.empty()) {
    const std::string near = nearest_name(value, choices);
    if (!near.empty()) remedy = "did you mean " + near + "?";
  }
  throw OptionError({where, description_of(row), quoted(value), remedy});
}

// "8" would be eight bytes, which nobody means; from a million on bytes are meant.
void check_size(const OptionRow& row, const std::string& value, const std::string& where) {
  const bool bare = value.find_first_not_of("0123456789. ") == value.npos;
  const std::int64_t bytes = parse_bytes(value, where);
  if (!bare && bytes > 0) return;
  const std::string units = bytes < 1'000'000 ? value + "GiB, " + value + "MiB" : value + "B is " + format_bytes(bytes);
  throw OptionError({where, description_of(row), quoted(value), bare ? "give a unit: " + units : ""});
}

}  // namespace

bool has_choices(const OptionRow& row) { return row.type == OptionType::text && row.range[0] != '\0'; }

std::string description_of(const OptionRow& row) {
  const std::string in_range = std::string(" in ") + row.range;
  switch (row.type) {
    case OptionType::number:
      return "a number" + in_range;
    case OptionType::integer:
      return "a whole number" + in_range;
    case OptionType::list:
      return "numbers with commas between them, each" + in_range;
    case OptionType::flag:
      return "true or false";
    case OptionType::paths:
      return "files or folders, - for standard input";
    case OptionType::text:
      break;
  }
  const std::string_view unit = row.unit;
  if (!has_choices(row))
    return unit == "bytes" ? "a size with its unit, like 8GiB" : row.is_path() ? "a path" : "a text";
  std::string text;
  for (const std::string& choice : choices_of(row.range)) text += (text.empty() ? "one of " : ", ") + choice;
  return text;
}

double parse_number(const std::string& text, const std::string& where, const std::string& expected) {
  double value = 0;
  const auto result = std::from_chars(text.data(), text.data() + text.size(), value);
  if (result.ec != std::errc() || result.ptr != text.data() + text.size() || std::isnan(value))
    throw OptionError({where, expected, quoted(text), ""});
  return value;
}

std::int64_t parse_integer(const std::string& text, const std::string& where, const std::string& expected) {
  std::int64_t value = 0;
  const auto result = std::from_chars(text.data(), text.data() + text.size(), value);
  if (result.ec != std::errc() || result.ptr != text.data() + text.size())
    throw OptionError({where, expected, quoted(text), ""});
  return value;
}

bool parse_flag(const std::string& text, const std::string& where) {
  if (text == "true" || text == "1") return true;
  if (text == "false" || text == "0") return false;
  throw OptionError({where, "true or false", quoted(text), ""});
}

std::string number_text(double value) {
  char buffer[40];
  const auto result = std::to_chars(buffer, buffer + sizeof buffer, value);
  std::string text(buffer, result.ptr);
  const std::size_t exponent = text.find('e');  // to_chars writes 1e-06
  if (exponent != text.npos && exponent + 2 < text.size() && text[exponent + 2] == '0') text.erase(exponent + 2, 1);
  return text;
}

void check_value(const OptionRow& row, const std::string& value, const std::string& where) {
  switch (row.type) {
    case OptionType::number:
      return check_interval(row, parse_number(value, where, description_of(row)), value, where);
    case OptionType::integer:
      return check_interval(row, static_cast<double>(parse_integer(value, where, description_of(row))), value, where);
    case OptionType::flag:
      return void(parse_flag(value, where));
    case OptionType::list:
      if (value.empty() && !row.default_text.empty()) throw OptionError({where, description_of(row), "nothing", ""});
      for (double number : parse_numbers(where, value)) check_interval(row, number, value, where);
      return;
    case OptionType::paths:
      return;
    case OptionType::text:
      break;
  }
  if (value.empty()) return;
  if (has_choices(row))
    check_choice(row, value, where);
  else if (std::string_view(row.unit) == "bytes")
    check_size(row, value, where);
}

std::vector<double> parse_numbers(const std::string& option, const std::string& text) {
  std::vector<double> numbers;
  if (text.empty()) return numbers;
  for (std::size_t begin = 0; begin <= text.size();) {
    const std::size_t end = std::min(text.find(',', begin), text.size());
    const std::size_t first = std::min(text.find_first_not_of(' ', begin), end);
    const std::size_t last = std::min(text.find_first_of(" ,", first), end);
    if (text.find_first_not_of(' ', last) < end)
      throw OptionError({option, "a comma between numbers", quoted(text), ""});
    numbers.push_back(parse_number(text.substr(first, last - first), option, "numbers with commas between them"));
    begin = end + 1;
  }
  return numbers;
}

}  // namespace espalier
