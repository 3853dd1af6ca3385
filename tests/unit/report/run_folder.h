// A run's folder written line by line, for the tests of its readers.
#pragma once

#include <filesystem>
#include <string>

namespace espalier::testing {

// Removed at the end.
class RunFolderOnDisk {
 public:
  RunFolderOnDisk();
  ~RunFolderOnDisk();
  void put(const std::string& name, const std::string& text) const;
  std::string get(const std::string& name) const;
  const std::filesystem::path& path() const { return path_; }

 private:
  std::filesystem::path path_;
};

// Lines of metrics.jsonl with every field that a closed loop writes, numbers that no other field has.
std::string whole_run();

}  // namespace espalier::testing
