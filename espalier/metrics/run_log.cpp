#include "espalier/metrics/run_log.h"

#include "espalier/base/error.h"

namespace espalier {
namespace {

// The length of `path` up to and with its last line end.
std::uintmax_t whole_lines(const std::filesystem::path& path) {
  std::ifstream file(path, std::ios::binary);
  std::uintmax_t size = 0;
  for (std::string line; std::getline(file, line) && !file.eof();) size += line.size() + 1;
  return size;
}

}  // namespace

RunLog::RunLog(std::filesystem::path path) : path_(std::move(path)) {
  std::error_code error;
  const std::uintmax_t size = std::filesystem::file_size(path_, error);
  if (!error) {
    const std::uintmax_t whole = whole_lines(path_);
    if (whole < size) std::filesystem::resize_file(path_, whole, error);
  }
  file_.open(path_, std::ios::binary | std::ios::app);
  if (!file_)
    throw OptionError({path_.string(), "a writable run log", "a file that cannot be opened",
                       "check that its folder exists and is writable"});
}

void RunLog::write(const Json& object) {
  file_ << object.dump(-1, ' ', false, Json::error_handler_t::replace) << '\n' << std::flush;
  if (!file_) throw OptionError({path_.string(), "a line added to the run log", "a failed write", "is the disk full?"});
}

}  // namespace espalier
