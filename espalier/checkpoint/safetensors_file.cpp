// Mapping a file and checking its header against its length.
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <numeric>
#include <utility>

#include "espalier/base/error.h"
#include "espalier/base/quantised_rows.h"
#include "espalier/checkpoint/safetensors.h"
#include "espalier/checkpoint/safetensors_header.h"

namespace espalier {
namespace {

constexpr std::uint64_t kMaxHeaderBytes = 100'000'000;  // the limit of the public readers

[[noreturn]] void fail(const std::filesystem::path& path, std::string expected, std::string got,
                       std::string remedy = "The file is damaged; fetch or write it again") {
  throw InputError({path.string(), std::move(expected), std::move(got), std::move(remedy)});
}

}  // namespace

SafetensorsFile::SafetensorsFile(std::filesystem::path path) : path_(std::move(path)) {
  map_file();
  try {
    std::uint64_t header_bytes = 0;
    for (int i = 7; i >= 0; --i) header_bytes = header_bytes << 8 | std::to_integer<std::uint64_t>(map_[i]);
    const auto* text = reinterpret_cast<const char*>(map_) + 8;
    const std::uint64_t rest = map_bytes_ - 8;
    if (std::string_view(reinterpret_cast<const char*>(map_), 8) == "version ")
      fail(path_, "a safetensors file", "a pointer of Git LFS", "Fetch the real file: git lfs pull");
    if (header_bytes < 2 || header_bytes > kMaxHeaderBytes)
      fail(path_, "a header of 2 to " + std::to_string(kMaxHeaderBytes) + " bytes", std::to_string(header_bytes),
           "The file is damaged or is not a safetensors file; fetch or write it again");
    if (header_bytes > rest)
      fail(path_, "a header of " + std::to_string(header_bytes) + " bytes",
           "only " + std::to_string(rest) + " more bytes");
    if (text[0] != '{') fail(path_, "a JSON object as header", "another first character");
    SafetensorsHeader header = parse_safetensors_header({text, header_bytes}, path_.string());
    entries_ = std::move(header.entries);
    metadata_ = std::move(header.metadata);
    place_entries(header.offsets, header_bytes);
  } catch (...) {
    ::munmap(const_cast<std::byte*>(map_), map_bytes_);
    throw;
  }
}

SafetensorsFile::SafetensorsFile(SafetensorsFile&& other) noexcept
    : path_(std::move(other.path_)),
      map_(std::exchange(other.map_, nullptr)),
      map_bytes_(std::exchange(other.map_bytes_, 0)),
      entries_(std::move(other.entries_)),
      index_(std::move(other.index_)),
      metadata_(std::move(other.metadata_)) {}

const std::byte* values_of(const SafetensorsEntry& entry, std::vector<std::byte>& room) {
  if (!entry.unpack) return entry.data;
  room.resize(static_cast<std::size_t>(entry.bytes));
  entry.unpack(room.data());
  return room.data();
}

void forget_pages(const SafetensorsEntry& entry) {
  const std::span<const std::byte> codes =
      entry.quantised ? entry.quantised->stored_codes() : std::span<const std::byte>();
  const std::byte* const first = entry.quantised ? codes.data() : entry.data;
  const std::int64_t bytes = entry.quantised ? std::ssize(codes) : entry.bytes;
  if (first == nullptr) return;
  const auto page = static_cast<std::uintptr_t>(::sysconf(_SC_PAGESIZE));
  const auto data = reinterpret_cast<std::uintptr_t>(first);
  const std::uintptr_t begin = (data + page - 1) / page * page;
  const std::uintptr_t end = (data + static_cast<std::uintptr_t>(bytes)) / page * page;
  if (begin < end) ::madvise(reinterpret_cast<void*>(begin), end - begin, MADV_DONTNEED);
}

SafetensorsFile::~SafetensorsFile() {
  if (map_ != nullptr) ::munmap(const_cast<std::byte*>(map_), map_bytes_);
}

const SafetensorsEntry* SafetensorsFile::find(const std::string& name) const {
  const auto found = index_.find(name);
  return found == index_.end() ? nullptr : &entries_[found->second];
}

void SafetensorsFile::map_file() {
  const int descriptor = ::open(path_.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
  if (descriptor < 0) fail(path_, "a readable safetensors file", std::strerror(errno), "");
  struct stat status;
  const bool regular = ::fstat(descriptor, &status) == 0 && S_ISREG(status.st_mode);
  const std::int64_t bytes = regular ? static_cast<std::int64_t>(status.st_size) : 0;
  void* address = MAP_FAILED;
  if (bytes >= 10) address = ::mmap(nullptr, static_cast<std::size_t>(bytes), PROT_READ, MAP_PRIVATE, descriptor, 0);
  const int reason = errno;
  ::close(descriptor);
  if (!regular) fail(path_, "a regular file", "another kind of file", "");
  if (bytes < 10) fail(path_, "at least the 10 bytes of an empty safetensors file", std::to_string(bytes));
  if (address == MAP_FAILED) fail(path_, "a file that can be mapped", std::strerror(reason), "");
  map_ = static_cast<const std::byte*>(address);
  map_bytes_ = static_cast<std::size_t>(bytes);
}

void SafetensorsFile::place_entries(const std::vector<std::pair<std::uint64_t, std::uint64_t>>& offsets,
                                    std::uint64_t header_bytes) {
  std::vector<std::size_t> order(entries_.size());
  std::iota(order.begin(), order.end(), std::size_t{0});
  std::stable_sort(order.begin(), order.end(), [&](std::size_t a, std::size_t b) { return offsets[a] < offsets[b]; });

  const std::uint64_t data_bytes = map_bytes_ - 8 - header_bytes;
  std::uint64_t position = 0;
  std::vector<SafetensorsEntry> sorted;
  sorted.reserve(entries_.size());
  for (const std::size_t i : order) {
    const auto [begin, end] = offsets[i];
    const std::string where = path_.string() + ": tensor '" + printable(entries_[i].name) + "'";
    if (begin != position)
      fail(where, "data that begins at " + std::to_string(position) + " where the previous tensor ends",
           std::to_string(begin) + (begin < position ? " (they overlap)" : " (a hole)"));
    if (end > data_bytes)
      fail(where, "data up to byte " + std::to_string(end),
           "a file with " + std::to_string(data_bytes) + " bytes of data",
           "The file is truncated; fetch or write it again");
    entries_[i].data = map_ + 8 + header_bytes + begin;
    position = end;
    index_.emplace(entries_[i].name, sorted.size());
    sorted.push_back(std::move(entries_[i]));
  }
  if (position != data_bytes)
    fail(path_, std::to_string(position) + " bytes of data",
         std::to_string(data_bytes) + ", more than the header names");
  entries_ = std::move(sorted);
}

}  // namespace espalier
