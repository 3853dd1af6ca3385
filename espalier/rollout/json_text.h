// JSON as text. Fields that are carried through unread must be JSON and are written as they came.
#pragma once

#include <string>
#include <string_view>

namespace espalier {

// Nesting deeper than this is refused, in everything a record carries.
inline constexpr int kDeepestJson = 128;

// True iff `text` (UTF-8) is one JSON value of RFC 8259 and nothing else, nested at most kDeepestJson deep.
bool is_json(std::string_view text);

// `text` (UTF-8) as a JSON string, with the shortest escapes.
std::string json_quoted(std::string_view text);

// Walks the members of an object that is_json accepted.
class JsonMembers {
 public:
  explicit JsonMembers(std::string_view object);
  // `key` and `value` as they stand in the text, the key with its quotes. False behind the last member.
  bool next(std::string_view& key, std::string_view& value);

 private:
  std::string_view text_;
  std::size_t at_ = 0;
};

// Shortest decimal text that reads back as the same number: "0.1", "-3.5e-08", "2". Finite numbers only.
void append_number(std::string& out, double value);
void append_number(std::string& out, std::int64_t value);

// Adds a member to the JSON object text `carried` (empty: none yet). `raw_value` is JSON.
void add_carried(std::string& carried, std::string_view key, std::string_view raw_value);

}  // namespace espalier
