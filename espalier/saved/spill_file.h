// A file without a name where bytes wait that memory has no room for: gone with the process, however it ends.
#pragma once

#include <cstdint>
#include <filesystem>

#include "espalier/saved/store.h"

namespace espalier {

// Bytes that may be stored away in this folder (empty: the system's for temporary files) where nobody asked for it:
// what is free there, less a margin; 0 for a folder that is not there or lies in memory.
std::int64_t room_to_spill(const std::filesystem::path& folder);

// Bytes a second that go to a file in this folder and come back, each way, checksums included: measured with a few
// megabytes in less than a second. Errors: those of SpillFile.
double spill_bytes_per_second(const std::filesystem::path& folder);

class SpillFile final : public Store {
 public:
  // Empty path: the system's folder for temporary files. Errors: WriteError naming the folder.
  explicit SpillFile(const std::filesystem::path& folder);
  ~SpillFile() override;
  SpillFile(const SpillFile&) = delete;
  SpillFile& operator=(const SpillFile&) = delete;

  const std::filesystem::path& folder() const { return folder_; }
  int descriptor() const { return descriptor_; }

  // For all three: a limit on the size of files is an error like a full disk, where SIGXFSZ is blocked.
  void reserve(std::int64_t bytes) override;
  void write(StoredChunk& chunk, const std::byte* memory) override;
  void read(const StoredChunk& chunk, std::byte* memory) override;

 private:
  // Without the page cache where the file system can; false: it cannot, try again.
  bool gives_up_direct(int error_number);

  std::filesystem::path folder_;
  int descriptor_ = -1;
  bool direct_ = false;
  std::int64_t reserved_ = 0;
};

}  // namespace espalier
