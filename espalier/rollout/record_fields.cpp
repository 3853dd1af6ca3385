#include "espalier/rollout/record_fields.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <limits>
#include <optional>

#include "espalier/rollout/json_text.h"

namespace espalier {
namespace {

namespace ondemand = simdjson::ondemand;
static_assert(LineReader::kPadding >= simdjson::SIMDJSON_PADDING);

constexpr const char* kFiniteJsonRemedy = "JSON has no NaN or Infinity: write null there";

// A value as a message shows it: at most 40 printable characters.
std::string shown(std::string_view token) {
  const auto last = token.find_last_not_of(" \t\r\n");
  token = token.substr(0, last == std::string_view::npos ? 0 : last + 1);
  std::string out;
  for (const char c : token.substr(0, 40)) out += c >= 0x20 && c < 0x7f ? c : '?';
  return token.size() > 40 ? out + "..." : out;
}

std::string shown(JsonValue& value) { return shown(value.raw_json_token()); }

std::string element_name(std::string_view field, std::int64_t index) {
  return std::string(field) + "[" + std::to_string(index) + "]";
}

bool names_no_number(const std::string& got) {
  std::string lower = got;
  for (char& c : lower) c = static_cast<char>(c | 0x20);
  return lower.find("nan") != std::string::npos || lower.find("inf") != std::string::npos;
}

const char* remedy_for(const std::string& got) { return names_no_number(got) ? kFiniteRemedy : ""; }

// NaN or an infinity where a writer has no finite number; none for any other text. Writers leave NaN, Infinity, null
// and numbers beyond double's range.
std::optional<double> not_finite(const std::string& token) {
  if (token == "null") return std::numeric_limits<double>::quiet_NaN();
  char* end = nullptr;
  const double value = std::strtod(token.c_str(), &end);
  if (token.empty() || *end != '\0' || std::isfinite(value)) return {};
  return value;
}

// Reads each element of a list with read(element, index); a wrapped list is entered where `shape` allows it.
template <class Read>
void for_each_element(JsonValue value, const RecordPlace& place, std::string_view field, const char* expected,
                      ListShape shape, const Read& read) {
  ondemand::array list;
  if (value.get_array().get(list)) throw place.wrong(field, expected, shown(value), remedy_for(shown(value)));
  std::int64_t index = 0;
  bool was_wrapped = false;
  for (auto element : list) {
    JsonValue item;
    if (element.get(item)) throw place.wrong(field, expected, "a list with invalid JSON");
    if (was_wrapped) throw place.wrong(field, "one list", "several lists", "Write one record per line");
    ondemand::json_type type;
    if (shape == ListShape::flat_or_wrapped && index == 0 && !item.type().get(type) &&
        type == ondemand::json_type::array) {
      for_each_element(item, place, field, expected, ListShape::flat, read);
      was_wrapped = true;
      continue;
    }
    read(item, index++);
  }
}

}  // namespace

InputError RecordPlace::broken(const std::string& got) const {
  return InputError({where(), "one JSON object on the line", got,
                     ends_file ? "The file ends in the middle of a record or without a newline: it may have been cut "
                                 "short while it was written or copied"
                               : "Write one record per line"});
}

InputError RecordPlace::wrong(std::string_view field, const std::string& expected, const std::string& got,
                              const std::string& remedy) const {
  return InputError({where() + ": " + std::string(field), expected, got, remedy});
}

void read_token_ids(JsonValue value, const RecordPlace& place, std::string_view field, std::int64_t vocabulary,
                    ListShape shape, std::vector<std::int32_t>& out) {
  constexpr std::int64_t kEnd = std::int64_t{1} << 31;
  const std::int64_t end = vocabulary > 0 ? std::min(vocabulary, kEnd) : kEnd;
  out.clear();
  for_each_element(value, place, field, "a list of token ids", shape, [&](JsonValue& item, std::int64_t index) {
    std::int64_t id = -1;
    const bool failed = item.get_int64().get(id) != simdjson::SUCCESS;
    if (failed || id < 0 || id >= end) {
      const std::string range = "an integer in [0, " + std::to_string(end) + ")";
      throw place.wrong(element_name(field, index), "a token id, " + range, failed ? shown(item) : std::to_string(id),
                        id >= end && vocabulary > 0 ? "Was this rollout made with another tokenizer or model?" : "");
    }
    out.push_back(static_cast<std::int32_t>(id));
  });
}

void read_numbers(JsonValue value, const RecordPlace& place, std::string_view field, ListShape shape,
                  std::vector<double>& out) {
  out.clear();
  for_each_element(value, place, field, "a list of numbers", shape, [&](JsonValue& item, std::int64_t index) {
    double number = 0;
    if (item.get_double().get(number))
      throw place.wrong(element_name(field, index), "a finite number", shown(item), remedy_for(shown(item)));
    out.push_back(number);
  });
}

void read_series(JsonValue value, const RecordPlace& place, std::string_view field, ListShape shape,
                 std::vector<double>& out) {
  out.clear();
  for_each_element(value, place, field, "a list of numbers", shape, [&](JsonValue& item, std::int64_t index) {
    double number = 0;
    if (item.get_double().get(number)) number = read_series_value(item, place, element_name(field, index));
    out.push_back(number);
  });
}

double read_series_value(JsonValue value, const RecordPlace& place, std::string_view field) {
  double number = 0;
  if (value.get_double().get(number) == simdjson::SUCCESS) return number;
  const std::string token = shown(value);
  const std::optional<double> none = not_finite(token);
  if (!none) throw place.wrong(field, "a finite number", token, remedy_for(token));
  return *none;
}

void read_mask(JsonValue value, const RecordPlace& place, std::string_view field, ListShape shape,
               std::vector<std::uint8_t>& out) {
  out.clear();
  for_each_element(value, place, field, "a list of 0 and 1", shape, [&](JsonValue& item, std::int64_t index) {
    bool flag = false;
    double number = 0;
    if (item.get_double().get(number) == simdjson::SUCCESS) {
      if (number != 0 && number != 1) {
        std::string got;
        append_number(got, number);
        throw place.wrong(element_name(field, index), "0 or 1", got,
                          "A mask keeps or drops a token's loss; it is not a weight");
      }
      out.push_back(number == 1);
    } else if (item.get_bool().get(flag) == simdjson::SUCCESS) {
      out.push_back(flag);
    } else {
      throw place.wrong(element_name(field, index), "0 or 1", shown(item));
    }
  });
}

double read_number(JsonValue value, const RecordPlace& place, std::string_view field) {
  double number = 0;
  if (value.get_double().get(number))
    throw place.wrong(field, "a finite number", shown(value), remedy_for(shown(value)));
  return number;
}

std::int64_t read_integer(JsonValue value, const RecordPlace& place, std::string_view field) {
  std::int64_t number = 0;
  if (value.get_int64().get(number)) throw place.wrong(field, "an integer", shown(value));
  return number;
}

bool is_null(JsonValue& value) {
  ondemand::json_type type;
  // The type is told by the first letter alone, so the word is compared too.
  return !value.type().get(type) && type == ondemand::json_type::null && shown(value) == "null";
}

bool is_list(JsonValue& value) {
  ondemand::json_type type;
  return !value.type().get(type) && type == ondemand::json_type::array;
}

std::string_view read_raw(JsonValue value, const RecordPlace& place, std::string_view field) {
  ondemand::json_type type;
  std::string_view raw;
  bool failed = value.type().get(type) != simdjson::SUCCESS;
  if (!failed && type == ondemand::json_type::array) {
    ondemand::array list;
    failed = value.get_array().get(list) || list.raw_json().get(raw);
  } else if (!failed && type == ondemand::json_type::object) {
    ondemand::object object;
    failed = value.get_object().get(object) || object.raw_json().get(raw);
  } else {
    raw = value.raw_json_token();
  }
  const auto last = raw.find_last_not_of(" \t\r\n");
  raw = raw.substr(0, last == std::string_view::npos ? 0 : last + 1);
  if (failed || !is_json(raw))
    throw place.wrong(field, "a JSON value nested at most " + std::to_string(kDeepestJson) + " deep", shown(raw),
                      names_no_number(shown(raw)) ? kFiniteJsonRemedy : "");
  return raw;
}

std::string read_scalar_text(JsonValue value, const RecordPlace& place, std::string_view field) {
  const char* const expected = "a string, a number or true or false";
  ondemand::json_type type;
  if (value.type().get(type)) throw place.wrong(field, expected, shown(value), remedy_for(shown(value)));
  if (type == ondemand::json_type::array || type == ondemand::json_type::object)
    throw place.wrong(field, expected, type == ondemand::json_type::array ? "a list" : "an object");
  if (type == ondemand::json_type::string) {
    std::string_view text;
    if (value.get_string().get(text)) throw place.wrong(field, expected, "a string with a broken escape");
    return json_quoted(text);
  }
  const std::string_view raw = read_raw(value, place, field);
  if (type != ondemand::json_type::number || raw.find_first_of(".eE") == std::string_view::npos)
    return std::string(raw == "-0" ? "0" : raw);
  std::string out;
  append_number(out, read_number(value, place, field));
  return out;
}

void for_each_member(ondemand::parser& parser, std::string_view line, const RecordPlace& place,
                     const std::function<void(std::string_view, JsonValue)>& visit) {
  ondemand::document document;
  simdjson::error_code error =
      parser.iterate(line.data(), line.size(), line.size() + LineReader::kPadding).get(document);
  if (error == simdjson::UTF8_ERROR) throw place.broken("bytes that are not UTF-8");
  if (error) throw place.broken(simdjson::error_message(error));
  ondemand::object record;
  if ((error = document.get_object().get(record))) {
    const bool object_begun = line.find_first_not_of(" \t\r") == line.find('{');
    throw place.broken(object_begun ? "an object without an end" : shown(line));
  }
  std::vector<std::string> keys;
  for (auto member : record) {
    ondemand::field field;
    std::string_view key;
    JsonValue value;
    if ((error = std::move(member).get(field)) || (error = field.unescaped_key().get(key)))
      throw place.broken(std::string("broken JSON") + (keys.empty() ? "" : " after field \"" + keys.back() + "\""));
    value = field.value();
    if (std::find(keys.begin(), keys.end(), key) != keys.end())
      throw place.wrong(key, "each field once", "this field twice in one record", "Keep one of them");
    keys.emplace_back(key);
    visit(keys.back(), value);
  }
  if (document.current_location().error() != simdjson::OUT_OF_BOUNDS) throw place.broken("more text after the object");
}

}  // namespace espalier
