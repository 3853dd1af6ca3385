// Checking a target, collecting its new content beside it, and the swap.
#include "espalier/checkpoint/atomic_output.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <fstream>
#include <string>
#include <system_error>

#include "espalier/base/atomic_file.h"
#include "espalier/base/error.h"

namespace espalier {
namespace fs = std::filesystem;
namespace {

constexpr const char* kManifest = "{\n  \"format\": \"espalier-output\",\n  \"version\": 1\n}\n";

fs::path previous_of(const fs::path& target) {
  return target.parent_path() / ("." + target.filename().string() + ".espalier-previous");
}

bool exists_at_all(const fs::path& path) {
  struct stat status;
  return ::lstat(path.c_str(), &status) == 0;
}

// After a kill between the two renames of swap_in the old directory stands under its other name.
void recover_previous(const fs::path& target) {
  const fs::path previous = previous_of(target);
  if (!exists_at_all(previous)) return;
  std::error_code ignored;
  if (exists_at_all(target))
    fs::remove_all(previous, ignored);
  else
    fs::rename(previous, target, ignored);
}

bool is_mount_point(const fs::path& directory) {
  struct statx status;
  if (::statx(AT_FDCWD, directory.c_str(), 0, STATX_BASIC_STATS, &status) == 0 &&
      (status.stx_attributes_mask & STATX_ATTR_MOUNT_ROOT) != 0)
    return (status.stx_attributes & STATX_ATTR_MOUNT_ROOT) != 0;
  struct stat own, parent;
  return ::stat(directory.c_str(), &own) == 0 && ::stat(directory.parent_path().c_str(), &parent) == 0 &&
         own.st_dev != parent.st_dev;
}

void check_replaceable(const fs::path& target) {
  std::error_code failure;
  if (!fs::is_directory(target, failure))
    throw OptionError({target.string(), "a new or replaceable directory", "a file", "Choose another name"});
  if (target == target.root_path() || is_mount_point(target))
    throw OptionError(
        {target.string(), "a directory that can be replaced as a whole", "a mount point", "Name a folder inside it"});
  const bool empty = fs::is_empty(target, failure);
  if (failure) throw_output_error(target, "read this directory", failure.value());
  if (!empty && !is_espalier_output(target))
    throw OptionError({target.string(), "a new or empty directory, or one that Espalier wrote",
                       "a directory with other content", "Choose another name, or empty it yourself"});
  if (::access(target.c_str(), W_OK | X_OK) != 0) throw_output_error(target, "replace this directory", errno);
}

// Files first, then the names in their directories.
void sync_tree(const fs::path& directory) {
  std::error_code failure;
  for (fs::directory_iterator entry(directory, failure), end; !failure && entry != end; entry.increment(failure)) {
    if (entry->is_symlink()) continue;
    if (entry->is_directory()) {
      sync_tree(entry->path());
      continue;
    }
    const int descriptor = ::open(entry->path().c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    if (descriptor < 0) throw_output_error(entry->path(), "synchronise this file", errno);
    const bool failed = ::fsync(descriptor) != 0 && errno != EINVAL && errno != ENOTSUP;
    const int reason = errno;
    ::close(descriptor);
    if (failed) throw_output_error(entry->path(), "synchronise this file", reason);
  }
  if (failure) throw_output_error(directory, "read this directory", failure.value());
  sync_directory(directory);
}

}  // namespace

bool is_espalier_output(const fs::path& directory) {
  std::ifstream file(directory / "espalier" / "manifest.json");
  std::string text(256, '\0');
  file.read(text.data(), static_cast<std::streamsize>(text.size()));
  return text.find("\"espalier-output\"") != std::string::npos;
}

void check_output_directory(const fs::path& given) {
  const fs::path target = resolved_target(given);
  if (!target.has_filename())
    throw OptionError(
        {target.string(), "a directory that can be replaced as a whole", "the root", "Name a folder inside it"});
  std::error_code failure;
  if (!fs::is_directory(target.parent_path(), failure))
    throw OptionError({target.string(), "a name in an existing directory",
                       "no directory '" + target.parent_path().string() + "'", "Create it first, or correct the path"});
  recover_previous(target);
  remove_leftovers(target);
  if (exists_at_all(target)) check_replaceable(target);
  // The only sure test of permissions, quotas and read-only mounts is to create something.
  fs::path probe;
  const int descriptor = create_partial(target, true, probe);
  ::rmdir(probe.c_str());
  ::close(descriptor);
}

ClaimedDirectory::ClaimedDirectory(const fs::path& given, bool may_replace) {
  const fs::path target = resolved_target(given);
  check_output_directory(target);
  std::error_code failure;
  if (!may_replace && exists_at_all(target) && !fs::is_empty(target, failure))
    throw OptionError({target.string(), "a directory that does not exist yet", "one that exists",
                       "use --overwrite to replace it, or choose another name"});
  lock_ = create_lock(target, lock_file_);
  if (lock_ < 0)
    throw OptionError({target.string(), "a directory that no other process writes", "one that is being written",
                       "wait for the other process, or choose another name"});
}

ClaimedDirectory::~ClaimedDirectory() {
  ::unlink(lock_file_.c_str());
  ::close(lock_);
}

AtomicDirectory::AtomicDirectory(const fs::path& target) : target_(resolved_target(target)) {
  check_output_directory(target_);
  lock_ = create_partial(target_, true, partial_);
}

AtomicDirectory::~AtomicDirectory() {
  std::error_code ignored;
  if (!partial_.empty()) fs::remove_all(partial_, ignored);
  if (lock_ >= 0) ::close(lock_);
}

void AtomicDirectory::commit() {
  const fs::path folder = partial_ / "espalier";
  if (::mkdir(folder.c_str(), 0777) != 0 && errno != EEXIST) throw_output_error(folder, "create this directory", errno);
  OutputFile manifest(folder / "manifest.json");
  manifest.write(kManifest);
  manifest.close_synced();
  sync_tree(partial_);
  swap_in();
  sync_directory(target_.parent_path());
  // Anything that stands under the partial name now is the old content.
  std::error_code ignored;
  fs::remove_all(partial_, ignored);
  partial_.clear();
}

void AtomicDirectory::swap_in() {
  if (!exists_at_all(target_)) {
    if (::rename(partial_.c_str(), target_.c_str()) != 0) throw_output_error(target_, "create this directory", errno);
    return;
  }
  check_replaceable(target_);
  if (::renameat2(AT_FDCWD, partial_.c_str(), AT_FDCWD, target_.c_str(), RENAME_EXCHANGE) == 0) return;
  if (errno != EINVAL && errno != ENOSYS && errno != ENOTSUP)
    throw_output_error(target_, "replace this directory", errno);
  const fs::path previous = previous_of(target_);
  if (::rename(target_.c_str(), previous.c_str()) != 0) throw_output_error(target_, "replace this directory", errno);
  if (::rename(partial_.c_str(), target_.c_str()) != 0) {
    const int reason = errno;
    (void)::rename(previous.c_str(), target_.c_str());
    throw_output_error(target_, "replace this directory", reason);
  }
  std::error_code ignored;
  fs::remove_all(previous, ignored);
}

}  // namespace espalier
