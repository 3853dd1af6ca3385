#include "espalier/serve/journal.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>
#include <zlib.h>

#include <array>
#include <cerrno>
#include <cstring>
#include <fstream>
#include <sstream>
#include <utility>

#include "espalier/base/atomic_file.h"

namespace espalier::serve {
namespace {

constexpr std::uint32_t kMostBytes = 0xfffffff0;  // of a record

struct Head {
  std::uint32_t size = 0, sum = 0;
};

std::uint32_t sum_of(std::uint32_t sum, std::string_view text) {
  if (text.empty()) return sum;  // zlib begins anew where a text has no address
  return static_cast<std::uint32_t>(crc32_z(sum, reinterpret_cast<const Bytef*>(text.data()), text.size()));
}

// The whole records of a file's text; sets `end` to where the last one ends.
std::vector<std::string_view> records_of(std::string_view text, std::size_t& end) {
  std::vector<std::string_view> out;
  end = 0;
  while (text.size() - end >= sizeof(Head)) {
    Head head;
    std::memcpy(&head, text.data() + end, sizeof head);
    if (head.size > text.size() - end - sizeof head) break;
    const std::string_view record = text.substr(end + sizeof head, head.size);
    if (sum_of(0, record) != head.sum) break;
    out.push_back(record);
    end += sizeof head + head.size;
  }
  return out;
}

std::string whole_text(const std::filesystem::path& file) {
  std::ifstream in(file, std::ios::binary);
  std::ostringstream text;
  text << in.rdbuf();
  return std::move(text).str();
}

}  // namespace

Journal::Journal(std::filesystem::path file, bool sync) : file_(std::move(file)), sync_(sync) {
  std::size_t end = 0;
  const std::string text = whole_text(file_);
  records_of(text, end);
  bytes_ = static_cast<std::int64_t>(end);
  descriptor_ = ::open(file_.c_str(), O_WRONLY | O_CREAT | O_CLOEXEC, 0600);
  if (descriptor_ < 0) throw_output_error(file_, "open this file", errno);
  if (::ftruncate(descriptor_, bytes_) != 0 || ::lseek(descriptor_, bytes_, SEEK_SET) < 0)
    throw_output_error(file_, "write this file", errno);
}

Journal::~Journal() {
  if (descriptor_ >= 0) ::close(descriptor_);
}

Journal::Journal(Journal&& other) noexcept
    : file_(std::move(other.file_)),
      descriptor_(std::exchange(other.descriptor_, -1)),
      sync_(other.sync_),
      bytes_(other.bytes_) {}

Journal& Journal::operator=(Journal&& other) noexcept {
  std::swap(file_, other.file_);
  std::swap(descriptor_, other.descriptor_);
  std::swap(sync_, other.sync_);
  std::swap(bytes_, other.bytes_);
  return *this;
}

void Journal::append(std::string_view head_text, std::string_view body) {
  const std::size_t size = head_text.size() + body.size();
  if (size > kMostBytes) throw_output_error(file_, "keep a request of this size", EFBIG);
  Head head{static_cast<std::uint32_t>(size), sum_of(sum_of(0, head_text), body)};
  std::array<iovec, 3> parts{iovec{&head, sizeof head}, iovec{const_cast<char*>(head_text.data()), head_text.size()},
                             iovec{const_cast<char*>(body.data()), body.size()}};
  std::size_t first = 0, left = sizeof head + size;
  int failed = 0;
  while (left > 0) {
    const ssize_t written = ::writev(descriptor_, parts.data() + first, static_cast<int>(parts.size() - first));
    if (written < 0 && errno == EINTR) continue;
    if (written <= 0) {
      failed = written < 0 ? errno : EIO;
      break;
    }
    left -= static_cast<std::size_t>(written);
    for (auto rest = static_cast<std::size_t>(written); rest > 0 && first < parts.size();) {
      const std::size_t taken = std::min(rest, parts[first].iov_len);
      parts[first].iov_base = static_cast<char*>(parts[first].iov_base) + taken;
      parts[first].iov_len -= taken, rest -= taken;
      if (parts[first].iov_len == 0) ++first;
    }
    while (first < parts.size() && parts[first].iov_len == 0) ++first;
  }
  if (failed == 0 && sync_ && ::fdatasync(descriptor_) != 0) failed = errno;
  if (failed == 0) {
    bytes_ += static_cast<std::int64_t>(sizeof head + size);
    return;
  }
  // The written part of it would hide all later records.
  if (::ftruncate(descriptor_, bytes_) == 0) ::lseek(descriptor_, bytes_, SEEK_SET);
  throw_output_error(file_, "write this file", failed);
}

std::vector<std::string> read_journal(const std::filesystem::path& file) {
  std::size_t end = 0;
  const std::string text = whole_text(file);
  std::vector<std::string> out;
  for (const std::string_view record : records_of(text, end)) out.emplace_back(record);
  return out;
}

}  // namespace espalier::serve
