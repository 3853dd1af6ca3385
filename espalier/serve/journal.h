// Files of records that only grow: what a server has accepted, so that a killed one goes on.
//
// A record is its length, its checksum and its bytes, handed to the system in one call: it survives the process, and
// with `sync` the machine, too. A record that was cut by a kill is the last one; it is dropped when the file is opened.
#pragma once

#include <cstdint>
#include <filesystem>
#include <string>
#include <string_view>
#include <vector>

namespace espalier::serve {

class Journal {
 public:
  // Opens or creates the file, and drops what follows its last whole record. Errors: WriteError.
  Journal(std::filesystem::path file, bool sync);
  ~Journal();
  Journal(Journal&& other) noexcept;
  Journal& operator=(Journal&& other) noexcept;

  // Errors: WriteError; the file is then as before.
  void append(std::string_view head, std::string_view body = {});
  std::int64_t bytes() const { return bytes_; }

 private:
  std::filesystem::path file_;
  int descriptor_ = -1;
  bool sync_ = false;
  std::int64_t bytes_ = 0;
};

// The whole records of a file, in order; none where there is no file.
std::vector<std::string> read_journal(const std::filesystem::path& file);

}  // namespace espalier::serve
