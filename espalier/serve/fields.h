// Members of a JSON request, read with their types.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "espalier/base/json.h"

namespace espalier::serve {

// A request that is answered with an HTTP status instead of its result.
struct Refused {
  int status;
  std::string detail;
};

class Fields {
 public:
  // Errors: Refused with status 400 unless the text is one JSON object.
  static Fields of_body(const std::string& body);
  explicit Fields(Json object) : json_(std::move(object)) {}

  // A member that is absent or null counts as not given. Errors of all: InputError, naming the member, for another type
  // or a number out of range; without a default also for one that is not given.
  bool has(const char* name) const;
  std::string text(const char* name) const;
  std::string text(const char* name, const std::string& otherwise) const;
  std::int64_t integer(const char* name, std::int64_t least, std::int64_t most) const;
  std::int64_t integer(const char* name, std::int64_t least, std::int64_t most, std::int64_t otherwise) const;
  double number(const char* name, double otherwise) const;  // finite
  bool flag(const char* name, bool otherwise) const;
  Json object(const char* name) const;               // {} where it is not given
  const Json& member(const char* name) const&;       // null where it is not given
  const Json& member(const char* name) && = delete;  // it would die with the object

 private:
  Json json_;
};

}  // namespace espalier::serve
