#include "espalier/rollout/line_reader.h"

#include <cstring>

#include "espalier/base/error.h"
#include "espalier/base/units.h"

namespace espalier {

LineReader::LineReader(ByteStream& stream, std::string name, std::function<void(std::int64_t)> refilled,
                       std::size_t block_bytes)
    : stream_(stream), name_(std::move(name)), refilled_(std::move(refilled)), buffer_(block_bytes + kPadding) {}

bool LineReader::next(Line& line) {
  while (next_any(line)) {
    if (line.number == 1 && line.text.starts_with("\xef\xbb\xbf")) line.text.remove_prefix(3);
    if (line.text.find_first_not_of(" \t\r") != std::string_view::npos) return true;
  }
  return false;
}

bool LineReader::next_any(Line& line) {
  std::size_t searched = 0;
  while (true) {
    const char* const from = buffer_.data() + begin_;
    const void* const newline = std::memchr(from + searched, '\n', end_ - begin_ - searched);
    if (newline != nullptr) {
      const auto length = static_cast<std::size_t>(static_cast<const char*>(newline) - from);
      line = {{from, length}, ++number_, false};
      begin_ += length + 1;
      return true;
    }
    searched = end_ - begin_;
    if (refill()) continue;
    if (searched == 0) return false;
    line = {{buffer_.data() + begin_, searched}, ++number_, true};
    begin_ = end_;
    return true;
  }
}

bool LineReader::refill() {
  if (at_end_) return false;
  if (begin_ > 0) {
    std::memmove(buffer_.data(), buffer_.data() + begin_, end_ - begin_);
    end_ -= begin_;
    begin_ = 0;
  }
  if (end_ > kLongestLine)
    throw InputError({name_ + ":" + std::to_string(number_ + 1),
                      "a line of at most " + format_bytes(static_cast<std::int64_t>(kLongestLine)), "a longer one",
                      "Write one record per line"});
  if (end_ + kPadding == buffer_.size()) buffer_.resize(2 * (buffer_.size() - kPadding) + kPadding);
  const std::size_t got = stream_.read(buffer_.data() + end_, buffer_.size() - kPadding - end_);
  at_end_ = got == 0;
  end_ += got;
  if (refilled_) refilled_(stream_.consumed_bytes());
  return got > 0;
}

}  // namespace espalier
