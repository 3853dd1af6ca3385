#include "espalier/serve/fields.h"

#include <cmath>

#include "espalier/base/error.h"

namespace espalier::serve {
namespace {

[[noreturn]] void refuse(const char* name, std::string expected, const Json& got) {
  std::string text = got.dump(-1, ' ', true, Json::error_handler_t::replace);
  constexpr std::size_t kShown = 80;
  if (text.size() > kShown) text = text.substr(0, kShown) + "...";
  throw InputError({name, std::move(expected), got.is_null() ? "none" : text, ""});
}

}  // namespace

namespace {

// Copies and texts of JSON recurse, so that a deep one could end the process.
bool is_shallow(const std::string& body) {
  constexpr int kDeepest = 32;
  int depth = 0;
  bool in_text = false;
  for (std::size_t i = 0; i < body.size(); ++i) {
    const char c = body[i];
    if (in_text && c == '\\')
      ++i;
    else if (c == '"')
      in_text = !in_text;
    else if (!in_text && (c == '[' || c == '{') && ++depth > kDeepest)
      return false;
    else if (!in_text && (c == ']' || c == '}'))
      --depth;
  }
  return true;
}

}  // namespace

Fields Fields::of_body(const std::string& body) {
  if (!is_shallow(body)) throw Refused{400, "the body's JSON is nested too deeply"};
  Json json = Json::parse(body, nullptr, false);
  if (!json.is_object()) throw Refused{400, "the body is not a JSON object"};
  return Fields(std::move(json));
}

const Json& Fields::member(const char* name) const& {
  static const Json kNull;
  const auto found = json_.find(name);
  return found == json_.end() ? kNull : *found;
}

bool Fields::has(const char* name) const { return !member(name).is_null(); }

std::string Fields::text(const char* name) const {
  const Json& json = member(name);
  if (!json.is_string()) refuse(name, "a text", json);
  return json.get<std::string>();
}

std::string Fields::text(const char* name, const std::string& otherwise) const {
  return has(name) ? text(name) : otherwise;
}

std::int64_t Fields::integer(const char* name, std::int64_t least, std::int64_t most) const {
  const Json& json = member(name);
  const std::string expected = text_of("a whole number from ", least, " to ", most);
  if (!json.is_number_integer()) refuse(name, expected, json);
  const bool beyond = json.is_number_unsigned() && json.get<std::uint64_t>() > static_cast<std::uint64_t>(INT64_MAX);
  const std::int64_t value = beyond ? INT64_MAX : json.get<std::int64_t>();
  if (value < least || value > most || beyond) refuse(name, expected, json);
  return value;
}

std::int64_t Fields::integer(const char* name, std::int64_t least, std::int64_t most, std::int64_t otherwise) const {
  return has(name) ? integer(name, least, most) : otherwise;
}

double Fields::number(const char* name, double otherwise) const {
  if (!has(name)) return otherwise;
  const Json& json = member(name);
  if (!json.is_number() || !std::isfinite(json.get<double>())) refuse(name, "a finite number", json);
  return json.get<double>();
}

bool Fields::flag(const char* name, bool otherwise) const {
  if (!has(name)) return otherwise;
  const Json& json = member(name);
  if (!json.is_boolean()) refuse(name, "true or false", json);
  return json.get<bool>();
}

Json Fields::object(const char* name) const {
  if (!has(name)) return Json::object();
  const Json& json = member(name);
  if (!json.is_object()) refuse(name, "an object", json);
  return json;
}

}  // namespace espalier::serve
