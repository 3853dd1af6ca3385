// Typed values of one JSON record, read with simdjson's on-demand parser, with errors that name line and field.
//
// On-demand parsing goes forward only and checks only what is read; whatever is carried through unread is therefore
// checked with is_json.
#pragma once

#include <simdjson.h>

#include <cstdint>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "espalier/base/error.h"
#include "espalier/rollout/line_reader.h"

namespace espalier {

using JsonValue = simdjson::ondemand::value;

// Where a record stands, and what its errors say about that.
struct RecordPlace {
  const std::string& file;
  std::int64_t line;
  bool ends_file;  // no newline behind it: perhaps cut short

  std::string where() const { return file + ":" + std::to_string(line); }
  InputError broken(const std::string& got) const;  // not JSON, or not an object
  InputError wrong(std::string_view field, const std::string& expected, const std::string& got,
                   const std::string& remedy = {}) const;
};

// The remedy for a number that is not finite, where a finite one is needed.
constexpr const char* kFiniteRemedy =
    "Repair it where the rollout was made. If that is impossible, leave out its whole group: advantages compare the "
    "rollouts of a group";

// A list, or with flat_or_wrapped also a list holding just that list (a batch of one).
enum class ListShape { flat, flat_or_wrapped };

// Each overwrites `out`.
void read_token_ids(JsonValue value, const RecordPlace& place, std::string_view field, std::int64_t vocabulary,
                    ListShape shape, std::vector<std::int32_t>& out);
void read_numbers(JsonValue value, const RecordPlace& place, std::string_view field, ListShape shape,
                  std::vector<double>& out);
// The same for a series of the response. NaN, infinities and null are kept: NaN or an infinity stands in their place,
// until settle_series (settled_series.h) decides.
void read_series(JsonValue value, const RecordPlace& place, std::string_view field, ListShape shape,
                 std::vector<double>& out);
void read_mask(JsonValue value, const RecordPlace& place, std::string_view field, ListShape shape,
               std::vector<std::uint8_t>& out);

double read_number(JsonValue value, const RecordPlace& place, std::string_view field);
// One number for a whole series, kept as by read_series.
double read_series_value(JsonValue value, const RecordPlace& place, std::string_view field);
std::int64_t read_integer(JsonValue value, const RecordPlace& place, std::string_view field);

// Both leave the value readable, and are false for text that is no JSON value.
bool is_null(JsonValue& value);
bool is_list(JsonValue& value);

// The value's own text, checked to be JSON.
std::string_view read_raw(JsonValue value, const RecordPlace& place, std::string_view field);

// The value as canonical JSON text of a scalar: 1, "a", 0.5, true. InputError for lists and objects.
std::string read_scalar_text(JsonValue value, const RecordPlace& place, std::string_view field);

// Calls visit(key, value) for each member of the record on `line`, which must be one JSON object with unequal keys.
void for_each_member(simdjson::ondemand::parser& parser, std::string_view line, const RecordPlace& place,
                     const std::function<void(std::string_view, JsonValue)>& visit);

}  // namespace espalier
