// An unnamed file for bytes that do not fit into memory. It disappears with the process, however the process ends.
#pragma once

#include <cstdint>
#include <filesystem>

#include "espalier/saved/store.h"

namespace espalier {

// Bytes that may be offloaded to this folder without being requested (empty: the system's folder for temporary files):
// 90 % of the free space; 0 if the folder does not exist or is in memory (tmpfs, ramfs).
std::int64_t room_to_spill(const std::filesystem::path& folder);

// Bytes a second of writing to a file in this folder and of reading it back, checksums included. Measured with 64 MiB,
// or as much as is written in 0.3 seconds. Throws the errors of SpillFile.
double spill_bytes_per_second(const std::filesystem::path& folder);

class SpillFile final : public Store {
 public:
  // An empty path is the system's folder for temporary files. Errors: WriteError naming the folder.
  explicit SpillFile(const std::filesystem::path& folder);
  ~SpillFile() override;
  SpillFile(const SpillFile&) = delete;
  SpillFile& operator=(const SpillFile&) = delete;

  const std::filesystem::path& folder() const { return folder_; }
  int descriptor() const { return descriptor_; }

  // For reserve and write: exceeding the file size limit is an error like a full disk, if SIGXFSZ is blocked.
  void reserve(std::int64_t bytes) override;
  void write(StoredChunk& chunk, const std::byte* memory) override;
  void read(const StoredChunk& chunk, std::byte* memory) override;

 private:
  // After a failed call. True: direct access was refused and is now off, so the call must be made again; false: the
  // error has another cause.
  bool gives_up_direct(int error_number);

  std::filesystem::path folder_;
  int descriptor_ = -1;
  bool direct_ = false;  // bypasses the page cache (O_DIRECT)
  std::int64_t reserved_ = 0;
};

}  // namespace espalier
