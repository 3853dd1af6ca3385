// A file without a name where bytes wait that memory has no room for: gone with the process, however it ends.
#pragma once

#include <cstdint>
#include <filesystem>
#include <mutex>
#include <string>

namespace espalier {

// One run of bytes in the file. `offset` is a multiple of kAlignment.
struct SpilledChunk {
  std::int64_t offset = 0, bytes = 0;
  std::uint32_t checksum = 0;  // CRC-32 of the bytes, set by write
};

// Bytes that may be stored away in this folder (empty: the system's for temporary files) where nobody asked for it:
// what is free there, less a margin; 0 for a folder that is not there or lies in memory.
std::int64_t room_to_spill(const std::filesystem::path& folder);

class SpillFile {
 public:
  // Chunks begin at multiples of it, and memory that they are written from or read to is aligned to it and as long.
  static constexpr std::int64_t kAlignment = 4096;
  static constexpr std::int64_t aligned(std::int64_t bytes) {
    return (bytes + kAlignment - 1) / kAlignment * kAlignment;
  }

  // Empty path: the system's folder for temporary files. Errors: WriteError naming the folder.
  explicit SpillFile(const std::filesystem::path& folder);
  ~SpillFile();
  SpillFile(const SpillFile&) = delete;
  SpillFile& operator=(const SpillFile&) = delete;

  const std::filesystem::path& folder() const { return folder_; }
  int descriptor() const { return descriptor_; }

  // The three below must run on a thread in which SIGXFSZ is blocked: a limit on the size of files is then an error
  // like a full disk.

  // Space for so many bytes, taken from the disk now. Errors: WriteError, where it has not got them.
  void reserve(std::int64_t bytes);
  // Errors: WriteError.
  void write(SpilledChunk& chunk, const std::byte* memory);
  // Errors: InputError where the bytes are not those that were written.
  void read(const SpilledChunk& chunk, std::byte* memory);

 private:
  // Without the page cache where the file system can; false: it cannot, try again.
  bool gives_up_direct(int error_number);

  std::filesystem::path folder_;
  int descriptor_ = -1;
  bool direct_ = false;
  std::int64_t reserved_ = 0;
};

}  // namespace espalier
