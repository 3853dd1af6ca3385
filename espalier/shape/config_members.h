// The members of a config.json, checked as they are read.
#pragma once

#include <cmath>
#include <cstdint>
#include <string>

#include "espalier/base/error.h"
#include "espalier/base/json.h"

namespace espalier {

// A remedy for models that the program refuses, but that transformers' code may run.
inline constexpr const char* kServedInPython =
    "espalier.hf and espalier.trl share prompts around transformers' own code, for most causal models; "
    "espalier.hf.check(model) says whether for this one (docs/python.md)";

inline std::string shown(const Json& value) {
  std::string text = value.dump(-1, ' ', true, Json::error_handler_t::replace);
  return text.size() > 60 ? text.substr(0, 57) + "..." : text;
}

// Members of one JSON object, checked as they are read; `where` and the member's name go into every error.
class Members {
 public:
  Members(const Json& object, std::string where, std::string path = "")
      : object_(object), where_(std::move(where)), path_(std::move(path)) {}

  bool is_null(const char* name) const { return object_.contains(name) && object_.at(name).is_null(); }
  bool has(const char* name) const { return object_.contains(name) && !object_.at(name).is_null(); }
  const Json& at(const char* name) const { return object_.at(name); }
  const Json& all() const { return object_; }

  [[noreturn]] void fail(const char* name, const std::string& expected) const {
    throw InputError({where_, text_of("member '", path_, name, "' to be ", expected),
                      object_.contains(name) ? shown(object_.at(name)) : std::string("nothing"), ""});
  }
  [[noreturn]] void refuse(const std::string& got, const std::string& supported) const {
    throw UnsupportedError({where_, supported, got, kServedInPython});
  }

  std::int64_t integer(const char* name, std::int64_t low, std::int64_t high) const {
    const std::string expected = text_of("an integer in [", low, ", ", high, "]");
    if (!has(name)) fail(name, expected);
    const Json& value = at(name);
    if (!value.is_number()) fail(name, expected);
    // Through double: exact for everything in range, and no overflow for what is not.
    const double number = value.get<double>();
    if (!(number >= static_cast<double>(low) && number <= static_cast<double>(high)) || number != std::floor(number))
      fail(name, expected);
    return static_cast<std::int64_t>(number);
  }
  std::int64_t integer(const char* name, std::int64_t low, std::int64_t high, std::int64_t absent) const {
    return has(name) ? integer(name, low, high) : absent;
  }
  double positive(const char* name, double absent) const {
    if (!has(name)) return absent;
    const double value = at(name).is_number() ? at(name).get<double>() : 0;
    if (!(value > 0) || !std::isfinite(value)) fail(name, "a number above 0");
    return value;
  }
  bool flag(const char* name, bool absent) const {
    if (!has(name)) return absent;
    if (!at(name).is_boolean()) fail(name, "true or false");
    return at(name).get<bool>();
  }
  std::string text(const char* name, const std::string& absent) const {
    if (!has(name)) return absent;
    if (!at(name).is_string()) fail(name, "a string");
    return at(name).get<std::string>();
  }
  const std::string& where() const { return where_; }

 private:
  const Json& object_;
  std::string where_, path_;
};

}  // namespace espalier
