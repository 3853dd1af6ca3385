// Lines of a byte stream, each with readable bytes behind it, as simdjson wants them.
//
// One buffer of a few MiB holds a block of the file and grows only for a line longer than that, so that a file is
// never in memory as text.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "espalier/rollout/byte_stream.h"

namespace espalier {

struct Line {
  std::string_view text;    // without its newline; valid until the next line is read
  std::int64_t number = 0;  // from 1
  bool ends_file = false;   // no newline follows
};

class LineReader {
 public:
  static constexpr std::size_t kPadding = 64;  // bytes that may be read behind a line
  static constexpr std::size_t kLongestLine = std::size_t{1} << 30;

  // `refilled` runs after every block with the bytes of the file read so far.
  LineReader(ByteStream& stream, std::string name, std::function<void(std::int64_t)> refilled,
             std::size_t block_bytes = std::size_t{4} << 20);

  // The next line that holds more than blanks; a byte order mark at the start is skipped. False at the end.
  // InputError for a line longer than kLongestLine.
  bool next(Line& line);

 private:
  bool next_any(Line& line);
  bool refill();

  ByteStream& stream_;
  std::string name_;
  std::function<void(std::int64_t)> refilled_;
  std::vector<char> buffer_;
  std::size_t begin_ = 0, end_ = 0;  // unread bytes of the buffer
  std::int64_t number_ = 0;
  bool at_end_ = false;
};

}  // namespace espalier
