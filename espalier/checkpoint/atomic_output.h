// An output directory that is complete or as it was before, also when the process is killed at any moment.
//
// It is written beside the target and changes places with it in one system call (renameat2, RENAME_EXCHANGE); the old
// one is removed afterwards. File systems without that call get two renames instead; a kill between the two leaves the
// old directory as `.<name>.espalier-previous`, which check_output_directory puts back.
#pragma once

#include <filesystem>

namespace espalier {

// Called before any work of a run: refuses a target that could not be replaced at the end, and tidies up after killed
// runs. Accepted are a name that does not exist in a writable directory, an empty directory, and a directory that
// Espalier wrote (it holds espalier/manifest.json), which the run may replace.
// Errors: OptionError.
void check_output_directory(const std::filesystem::path& target);

// An output directory that belongs to one run until the object's end: it checks the target as above and keeps other
// processes from writing it. Errors: OptionError: another process has it; or it exists, is not empty, and `may_replace`
// is false.
class ClaimedDirectory {
 public:
  ClaimedDirectory(const std::filesystem::path& target, bool may_replace);
  ClaimedDirectory(const ClaimedDirectory&) = delete;
  ClaimedDirectory& operator=(const ClaimedDirectory&) = delete;
  ~ClaimedDirectory();

 private:
  std::filesystem::path lock_file_;
  int lock_ = -1;
};

// True when AtomicDirectory::commit wrote this directory.
bool is_espalier_output(const std::filesystem::path& directory);

class AtomicDirectory {
 public:
  explicit AtomicDirectory(const std::filesystem::path& target);  // checks the target as above
  AtomicDirectory(const AtomicDirectory&) = delete;
  AtomicDirectory& operator=(const AtomicDirectory&) = delete;
  ~AtomicDirectory();  // removes what was not committed

  // Where to write until commit: empty at first, on the target's file system.
  const std::filesystem::path& path() const { return partial_; }

  // Adds espalier/manifest.json, waits until all files are on the device, puts the directory in the target's place and
  // removes what was there. Errors: OptionError; the target is then unchanged. Nothing may be written afterwards.
  void commit();

 private:
  void swap_in();

  std::filesystem::path target_, partial_;
  int lock_ = -1;
};

}  // namespace espalier
