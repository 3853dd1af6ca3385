#include "espalier/saved/spill_file.h"

#include <fcntl.h>
#include <linux/magic.h>
#include <signal.h>
#include <sys/vfs.h>
#include <unistd.h>
#include <zlib.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <memory>
#include <thread>
#include <vector>

#include "espalier/base/atomic_file.h"
#include "espalier/base/error.h"
#include "espalier/base/units.h"

namespace espalier {
namespace {

std::uint32_t checksum_of(const std::byte* memory, std::int64_t bytes) {
  return static_cast<std::uint32_t>(
      crc32_z(0, reinterpret_cast<const Bytef*>(memory), static_cast<std::size_t>(bytes)));
}

// An open file of that folder that has no name, or lost it at once.
int open_unnamed(const std::filesystem::path& folder) {
  const int unnamed = ::open(folder.c_str(), O_TMPFILE | O_RDWR | O_CLOEXEC | O_EXCL, 0600);
  if (unnamed >= 0 || (errno != EOPNOTSUPP && errno != EISDIR && errno != EINVAL)) return unnamed;
  std::string name = (folder / "espalier-spill-XXXXXX").string();
  const int named = ::mkostemp(name.data(), O_CLOEXEC);
  if (named >= 0) ::unlink(name.c_str());
  return named;
}

std::filesystem::path folder_or_default(const std::filesystem::path& folder) {
  std::error_code ignored;
  return folder.empty() ? std::filesystem::temp_directory_path(ignored) : folder;
}

}  // namespace

std::int64_t room_to_spill(const std::filesystem::path& folder) {
  struct statfs system;
  if (::statfs(folder_or_default(folder).c_str(), &system) != 0 || system.f_type == TMPFS_MAGIC ||
      system.f_type == RAMFS_MAGIC)
    return 0;
  return static_cast<std::int64_t>(0.9 * static_cast<double>(system.f_bavail) * static_cast<double>(system.f_bsize));
}

SpillFile::SpillFile(const std::filesystem::path& folder) : folder_(folder_or_default(folder)) {
  descriptor_ = open_unnamed(folder_);
  if (descriptor_ < 0) throw_output_error(folder_, "store a trunk's state in this folder (--spill-dir)", errno);
  direct_ = ::fcntl(descriptor_, F_SETFL, O_DIRECT) == 0;
}

SpillFile::~SpillFile() { ::close(descriptor_); }

void SpillFile::reserve(std::int64_t bytes) {
  bytes = aligned(bytes);
  if (bytes <= reserved_) return;
  const int refused = ::posix_fallocate(descriptor_, 0, bytes);
  if (refused != 0)
    throw_output_error(folder_, text_of("reserve ", format_bytes(bytes), " for a trunk's state (--spill-dir)"),
                       refused);
  reserved_ = bytes;
}

namespace {

double measured_bytes_per_second(const std::filesystem::path& folder) {
  constexpr std::int64_t kChunk = 1 << 20, kMost = 64;
  constexpr double kLongest = 0.3;  // seconds each way
  SpillFile file(folder);
  file.reserve(kMost * kChunk);
  void* const memory = std::aligned_alloc(Store::kAlignment, kChunk);
  const std::unique_ptr<void, decltype(&std::free)> owner(memory, &std::free);
  auto* const bytes = static_cast<std::byte*>(memory);
  for (std::int64_t i = 0; i < kChunk; ++i) bytes[i] = static_cast<std::byte>(i * i >> 3);  // not to be compressed away
  std::vector<StoredChunk> chunks;
  const auto seconds_of = [](auto&& work) {
    const auto begin = std::chrono::steady_clock::now();
    const auto passed = [&] { return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count(); };
    work(passed);
    return passed();
  };
  double seconds = seconds_of([&](auto&& passed) {
    while (static_cast<std::int64_t>(chunks.size()) < kMost && (chunks.empty() || passed() < kLongest)) {
      chunks.push_back({static_cast<std::int64_t>(chunks.size()) * kChunk, kChunk, 0});
      file.write(chunks.back(), bytes);
    }
  });
  seconds += seconds_of([&](auto&&) {
    for (const StoredChunk& chunk : chunks) file.read(chunk, bytes);
  });
  return 2 * static_cast<double>(chunks.size()) * static_cast<double>(kChunk) / std::max(seconds, 1e-9);
}

}  // namespace

double spill_bytes_per_second(const std::filesystem::path& folder) {
  double rate = 0;
  std::exception_ptr error;
  std::thread([&] {  // of its own: a limit on the size of files is an error there, not the end of the process
    sigset_t all;
    sigfillset(&all);
    pthread_sigmask(SIG_BLOCK, &all, nullptr);
    try {
      rate = measured_bytes_per_second(folder);
    } catch (...) {
      error = std::current_exception();
    }
  })
      .join();
  if (error) std::rethrow_exception(error);
  return rate;
}

bool SpillFile::gives_up_direct(int error_number) {
  if (!direct_ || error_number != EINVAL) return false;
  direct_ = false;
  return ::fcntl(descriptor_, F_SETFL, 0) == 0;
}

void SpillFile::write(StoredChunk& chunk, const std::byte* memory) {
  ESPALIER_INTERNAL(chunk.offset + chunk.bytes <= reserved_, chunk.offset, " + ", chunk.bytes, " of ", reserved_);
  chunk.checksum = checksum_of(memory, chunk.bytes);
  for (std::int64_t done = 0, all = aligned(chunk.bytes); done < all;) {
    const ssize_t count =
        ::pwrite(descriptor_, memory + done, static_cast<std::size_t>(all - done), chunk.offset + done);
    if (count < 0 && errno != EINTR && !gives_up_direct(errno))
      throw_output_error(folder_, "store a trunk's state in this folder (--spill-dir)", errno);
    if (count > 0) done += count;
  }
}

void SpillFile::read(const StoredChunk& chunk, std::byte* memory) {
  const auto fail = [&](const std::string& got) {
    throw InputError({text_of("the file in ", folder_.string(), " (--spill-dir), byte ", chunk.offset),
                      text_of("the ", chunk.bytes, " bytes that were stored there"), got,
                      "Look at the state of that disk, or choose another place; nothing was written"});
  };
  for (std::int64_t done = 0, all = aligned(chunk.bytes); done < all;) {
    const ssize_t count =
        ::pread(descriptor_, memory + done, static_cast<std::size_t>(all - done), chunk.offset + done);
    if (count == 0) fail("the end of the file");
    if (count < 0 && errno != EINTR && !gives_up_direct(errno)) fail(std::strerror(errno));
    if (count > 0) done += count;
  }
  if (checksum_of(memory, chunk.bytes) != chunk.checksum) fail("others: their checksum differs");
}

}  // namespace espalier
