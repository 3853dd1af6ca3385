// A run's record as JSON Lines: one object a line, on the disk as soon as write() returns.
#pragma once

#include <filesystem>
#include <fstream>

#include "espalier/base/json.h"

namespace espalier {

class RunLog {
 public:
  // Appends to `path`, or creates it. A last line that an interrupted run left without its end is cut off first.
  // Errors: OptionError where the file cannot be written.
  explicit RunLog(std::filesystem::path path);

  // Adds one line. NaN and infinities, which JSON lacks, become null; bytes that are no UTF-8 are replaced. Errors:
  // OptionError (a full disk).
  void write(const Json& object);

 private:
  std::filesystem::path path_;
  std::ofstream file_;
};

}  // namespace espalier
