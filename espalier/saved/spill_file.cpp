#include "espalier/saved/spill_file.h"

#include <fcntl.h>
#include <linux/magic.h>
#include <sys/vfs.h>
#include <unistd.h>
#include <zlib.h>

#include <cerrno>
#include <cstring>
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

bool SpillFile::gives_up_direct(int error_number) {
  if (!direct_ || error_number != EINVAL) return false;
  direct_ = false;
  return ::fcntl(descriptor_, F_SETFL, 0) == 0;
}

void SpillFile::write(SpilledChunk& chunk, const std::byte* memory) {
  chunk.checksum = checksum_of(memory, chunk.bytes);
  for (std::int64_t done = 0, all = aligned(chunk.bytes); done < all;) {
    const ssize_t count =
        ::pwrite(descriptor_, memory + done, static_cast<std::size_t>(all - done), chunk.offset + done);
    if (count < 0 && errno != EINTR && !gives_up_direct(errno))
      throw_output_error(folder_, "store a trunk's state in this folder (--spill-dir)", errno);
    if (count > 0) done += count;
  }
}

void SpillFile::read(const SpilledChunk& chunk, std::byte* memory) {
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
