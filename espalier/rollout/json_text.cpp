#include "espalier/rollout/json_text.h"

#include <charconv>
#include <cstdint>

namespace espalier {
namespace {

// A cursor that accepts exactly the grammar of RFC 8259; each accept_ function moves behind what it accepted.
class Scanner {
 public:
  explicit Scanner(std::string_view text, std::size_t at = 0) : text_(text), at_(at) {}

  std::size_t at() const { return at_; }
  bool finished() const { return at_ == text_.size(); }
  void skip_blanks() {
    while (!finished() && (peek() == ' ' || peek() == '\t' || peek() == '\n' || peek() == '\r')) ++at_;
  }
  bool accept(char c) {
    if (finished() || peek() != c) return false;
    ++at_;
    return true;
  }

  bool accept_value(int depth) {
    if (finished() || depth > kDeepestJson) return false;
    switch (peek()) {
      case '{':
        return accept_object(depth);
      case '[':
        return accept_array(depth);
      case '"':
        return accept_string();
      case 't':
        return accept_word("true");
      case 'f':
        return accept_word("false");
      case 'n':
        return accept_word("null");
      default:
        return accept_number();
    }
  }

  bool accept_string() {
    if (!accept('"')) return false;
    while (!finished()) {
      const char c = text_[at_++];
      if (c == '"') return true;
      if (static_cast<unsigned char>(c) < 0x20) return false;
      if (c == '\\' && !accept_escape()) return false;
    }
    return false;
  }

 private:
  char peek() const { return text_[at_]; }
  bool digit() const { return !finished() && peek() >= '0' && peek() <= '9'; }

  bool accept_word(std::string_view word) {
    if (text_.substr(at_, word.size()) != word) return false;
    at_ += word.size();
    return true;
  }

  bool accept_escape() {
    if (finished()) return false;
    const char c = text_[at_++];
    if (c != 'u') return std::string_view("\"\\/bfnrt").find(c) != std::string_view::npos;
    for (int i = 0; i < 4; ++i, ++at_)
      if (finished() || std::string_view("0123456789abcdefABCDEF").find(peek()) == std::string_view::npos) return false;
    return true;
  }

  bool accept_digits() {
    if (!digit()) return false;
    while (digit()) ++at_;
    return true;
  }

  bool accept_number() {
    accept('-');
    if (!accept('0') && !accept_digits()) return false;
    if (accept('.') && !accept_digits()) return false;
    if (accept('e') || accept('E')) {
      if (!accept('+')) accept('-');
      if (!accept_digits()) return false;
    }
    return true;
  }

  bool accept_array(int depth) {
    ++at_;
    skip_blanks();
    if (accept(']')) return true;
    while (true) {
      skip_blanks();
      if (!accept_value(depth + 1)) return false;
      skip_blanks();
      if (accept(']')) return true;
      if (!accept(',')) return false;
    }
  }

  bool accept_object(int depth) {
    ++at_;
    skip_blanks();
    if (accept('}')) return true;
    while (true) {
      skip_blanks();
      if (!accept_string()) return false;
      skip_blanks();
      if (!accept(':')) return false;
      skip_blanks();
      if (!accept_value(depth + 1)) return false;
      skip_blanks();
      if (accept('}')) return true;
      if (!accept(',')) return false;
    }
  }

  std::string_view text_;
  std::size_t at_;
};

}  // namespace

bool is_json(std::string_view text) {
  Scanner scanner(text);
  scanner.skip_blanks();
  if (!scanner.accept_value(1)) return false;
  scanner.skip_blanks();
  return scanner.finished();
}

std::string json_quoted(std::string_view text) {
  constexpr const char* kHex = "0123456789abcdef";
  std::string out = "\"";
  for (const char c : text) {
    switch (c) {
      case '"':
        out += "\\\"";
        break;
      case '\\':
        out += "\\\\";
        break;
      case '\n':
        out += "\\n";
        break;
      case '\r':
        out += "\\r";
        break;
      case '\t':
        out += "\\t";
        break;
      default:
        if (static_cast<unsigned char>(c) >= 0x20)
          out += c;
        else
          out += std::string("\\u00") + kHex[c >> 4] + kHex[c & 15];
    }
  }
  return out + '"';
}

JsonMembers::JsonMembers(std::string_view object) : text_(object) {
  Scanner scanner(text_);
  scanner.skip_blanks();
  scanner.accept('{');
  at_ = scanner.at();
}

bool JsonMembers::next(std::string_view& key, std::string_view& value) {
  Scanner scanner(text_, at_);
  scanner.skip_blanks();
  if (scanner.accept(',')) scanner.skip_blanks();
  const std::size_t key_begin = scanner.at();
  if (!scanner.accept_string()) return false;
  key = text_.substr(key_begin, scanner.at() - key_begin);
  scanner.skip_blanks();
  scanner.accept(':');
  scanner.skip_blanks();
  const std::size_t value_begin = scanner.at();
  if (!scanner.accept_value(0)) return false;
  value = text_.substr(value_begin, scanner.at() - value_begin);
  at_ = scanner.at();
  return true;
}

void append_number(std::string& out, double value) {
  char text[32];
  const auto result = std::to_chars(text, text + sizeof text, value);
  out.append(text, result.ptr);
}

void append_number(std::string& out, std::int64_t value) {
  char text[24];
  const auto result = std::to_chars(text, text + sizeof text, value);
  out.append(text, result.ptr);
}

void add_carried(std::string& carried, std::string_view key, std::string_view raw_value) {
  if (carried.empty())
    carried = "{";
  else
    carried.back() = ',';
  carried.append(json_quoted(key)).append(":").append(raw_value).append("}");
}

}  // namespace espalier
