// Files that are complete or absent.
//
// Output is written beside its target as `.<name>.espalier-partial-<pid>` and renamed onto it at the end. The
// writer holds an advisory lock on the partial file, so that the next run can tell the leftovers of a killed one from
// the work of a living one, also across containers that reuse process ids.
// Errors everywhere: WriteError, an OptionError, with the path, what was attempted, the system's reason and what to do.
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

namespace espalier {

// Appends to one file through a buffer of 1 MiB.
class OutputFile {
 public:
  explicit OutputFile(std::filesystem::path path);  // creates or truncates
  OutputFile(std::filesystem::path path, int descriptor) : path_(std::move(path)), descriptor_(descriptor) {}
  OutputFile(const OutputFile&) = delete;
  OutputFile& operator=(const OutputFile&) = delete;
  ~OutputFile();  // closes; what is still buffered is lost unless close_synced() ran

  void write(const void* data, std::size_t bytes);
  void write(std::string_view text) { write(text.data(), text.size()); }
  void flush();  // hands the buffer to the system
  void sync();   // flush, then waits until the bytes are on the device
  void close_synced();
  const std::filesystem::path& path() const { return path_; }

 private:
  void write_through(const char* data, std::size_t bytes);

  std::filesystem::path path_;
  std::string buffer_;
  int descriptor_ = -1;
};

// One file at `target`: complete after commit(), otherwise as it was. Symbolic links are followed, so that the file
// behind a link is replaced and the link stays. A target that is no regular file (a pipe, /dev/stdout) is written
// directly: there is nothing to replace.
class AtomicFile {
 public:
  explicit AtomicFile(std::filesystem::path target);
  AtomicFile(const AtomicFile&) = delete;
  AtomicFile& operator=(const AtomicFile&) = delete;
  ~AtomicFile();  // removes what was not committed

  void write(const void* data, std::size_t bytes) { file_->write(data, bytes); }
  void write(std::string_view text) { file_->write(text); }
  OutputFile& output() { return *file_; }
  void commit();  // synchronises, renames onto the target, synchronises the directory

 private:
  std::filesystem::path target_, partial_;  // partial_ is empty when written directly
  std::unique_ptr<OutputFile> file_;
};

// Refuses a file that could not be written, before any work is done for it. A target that exists is left as it is.
void check_output_file(const std::filesystem::path& target);

// Refuses outputs, existing or not, whose file system has not the room for all of them that go there.
struct ExpectedOutput {
  std::filesystem::path path;
  std::int64_t bytes = 0;
};
void require_disk_space(const std::vector<ExpectedOutput>& outputs);

// --- What directories that are replaced as a whole share with files ---

// Absolute, normalised, without a trailing slash, symbolic links of an existing target resolved.
std::filesystem::path resolved_target(const std::filesystem::path& target);

// Creates the partial file (or directory) of `target` and locks it. Returns its descriptor, sets `partial`.
int create_partial(const std::filesystem::path& target, bool directory, std::filesystem::path& partial);

// Creates and locks a file beside `target`, named like a partial one, so that it goes with the leftovers of a killed
// process. Returns its descriptor and sets `lock_file`; -1: another process holds it.
int create_lock(const std::filesystem::path& target, std::filesystem::path& lock_file);

// Removes partial files and directories of `target` whose writer is gone. Never throws: leftovers are only untidy.
void remove_leftovers(const std::filesystem::path& target);

// Waits until the entries of a directory (names, not contents) are on the device.
void sync_directory(const std::filesystem::path& directory);

// Throws the WriteError for a failed system call on an output path: "cannot <action>: <reason>".
[[noreturn]] void throw_output_error(const std::filesystem::path& path, const std::string& action, int error_number);

}  // namespace espalier
