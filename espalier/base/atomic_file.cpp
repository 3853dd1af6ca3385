// Output files: buffered writing, partial names, locks and renames.
#include "espalier/base/atomic_file.h"

#include <fcntl.h>
#include <signal.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <map>
#include <system_error>
#include <utility>

#include "espalier/base/error.h"
#include "espalier/base/units.h"

namespace espalier {
namespace fs = std::filesystem;
namespace {

constexpr std::size_t kBufferBytes = std::size_t{1} << 20;

std::string partial_prefix(const fs::path& target) { return "." + target.filename().string() + ".espalier-partial-"; }

const char* remedy_for(int error_number) {
  switch (error_number) {
    case ENOSPC:
    case EDQUOT:
      return "Free space there or choose another place; existing files are unchanged";
    case EACCES:
    case EPERM:
    case EROFS:
      return "Choose a place with write permission";
    case ENOENT:
    case ENOTDIR:
      return "Create the directory first, or correct the path";
    case EISDIR:
      return "Name a file, not a directory";
    case ENAMETOOLONG:
      return "Choose a shorter name";
    case EBUSY:
      return "Name a folder inside it: a mount point cannot be replaced";
    default:
      return "Choose another place, or look at the state of the file system";
  }
}

// The process id at the end of a partial name, 0 when there is none.
pid_t writer_of(const std::string& name, std::size_t prefix_length) {
  const long value = std::strtol(name.c_str() + prefix_length, nullptr, 10);
  return value > 0 ? static_cast<pid_t>(value) : 0;
}

// True if the open file is the one that has this name.
bool is_at(int descriptor, const fs::path& path) {
  struct stat by_descriptor, by_name;
  return ::fstat(descriptor, &by_descriptor) == 0 && ::stat(path.c_str(), &by_name) == 0 &&
         by_descriptor.st_ino == by_name.st_ino && by_descriptor.st_dev == by_name.st_dev;
}

// True when nobody can still be writing: the lock is free, or locks do not work here and the process is gone.
bool abandoned(const fs::path& path, pid_t writer) {
  const int descriptor = ::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK);
  if (descriptor < 0) return false;
  const int locked = ::flock(descriptor, LOCK_EX | LOCK_NB);
  const int reason = errno;
  ::close(descriptor);
  if (locked == 0) return true;
  if (reason == EWOULDBLOCK) return false;
  return writer != 0 && ::kill(writer, 0) != 0 && errno == ESRCH;
}

}  // namespace

void throw_output_error(const fs::path& path, const std::string& action, int error_number) {
  throw WriteError({path.string(), "to " + action, std::strerror(error_number), remedy_for(error_number)});
}

OutputFile::OutputFile(fs::path path) : path_(std::move(path)) {
  descriptor_ = ::open(path_.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666);
  if (descriptor_ < 0) throw_output_error(path_, "write this file", errno);
}

OutputFile::~OutputFile() {
  if (descriptor_ >= 0) ::close(descriptor_);
}

void OutputFile::write_through(const char* data, std::size_t bytes) {
  while (bytes > 0) {
    const ssize_t written = ::write(descriptor_, data, bytes);
    if (written < 0 && errno == EINTR) continue;
    if (written < 0) throw_output_error(path_, "write this file", errno);
    data += written;
    bytes -= static_cast<std::size_t>(written);
  }
}

void OutputFile::write(const void* data, std::size_t bytes) {
  if (buffer_.size() + bytes > kBufferBytes) flush();
  if (bytes >= kBufferBytes)
    write_through(static_cast<const char*>(data), bytes);
  else
    buffer_.append(static_cast<const char*>(data), bytes);
}

void OutputFile::flush() {
  write_through(buffer_.data(), buffer_.size());
  buffer_.clear();
}

void OutputFile::sync() {
  flush();
  // Pipes and devices have nothing to synchronise and say EINVAL.
  if (::fsync(descriptor_) != 0 && errno != EINVAL && errno != ENOTSUP && errno != EROFS)
    throw_output_error(path_, "write this file", errno);
}

void OutputFile::close_synced() {
  sync();
  const int descriptor = std::exchange(descriptor_, -1);
  if (::close(descriptor) != 0 && errno != EINTR) throw_output_error(path_, "close this file", errno);
}

fs::path resolved_target(const fs::path& target) {
  if (target.empty()) throw OptionError({"output path", "a name", "an empty text", ""});
  std::error_code ignored;
  const fs::path real = fs::canonical(target, ignored);
  if (!real.empty()) return real;
  fs::path path = fs::absolute(target).lexically_normal();
  return path.has_filename() ? path : path.parent_path();
}

int create_partial(const fs::path& target, bool directory, fs::path& partial) {
  const std::string stem = partial_prefix(target) + std::to_string(::getpid());
  const std::string action = directory ? "create this directory" : "write this file";
  for (int attempt = 1;; ++attempt) {
    partial = target.parent_path() / (attempt == 1 ? stem : stem + "-" + std::to_string(attempt));
    int descriptor = -1;
    if (!directory) {
      descriptor = ::open(partial.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
    } else if (::mkdir(partial.c_str(), 0777) == 0) {
      descriptor = ::open(partial.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
      // Another run may have taken it for a leftover before it could be locked.
      if (descriptor < 0 && errno == ENOENT) continue;
    }
    if (descriptor < 0 && errno == EEXIST && attempt < 1000) continue;
    if (descriptor < 0) throw_output_error(target, action, errno);
    (void)::flock(descriptor, LOCK_EX | LOCK_NB);
    if (is_at(descriptor, partial)) return descriptor;
    ::close(descriptor);
    if (attempt >= 1000) throw_output_error(target, action, EAGAIN);
  }
}

int create_lock(const fs::path& target, fs::path& lock_file) {
  lock_file = target.parent_path() / (partial_prefix(target) + "lock");
  while (true) {
    const int descriptor = ::open(lock_file.c_str(), O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0666);
    if (descriptor < 0) throw_output_error(target, "lock this place", errno);
    if (::flock(descriptor, LOCK_EX | LOCK_NB) != 0 && errno == EWOULDBLOCK) {
      ::close(descriptor);
      return -1;
    }
    if (is_at(descriptor, lock_file)) return descriptor;
    ::close(descriptor);  // its holder removed it meanwhile
  }
}

void remove_leftovers(const fs::path& target) {
  const std::string prefix = partial_prefix(target);
  std::error_code ignored;
  for (fs::directory_iterator entry(target.parent_path(), ignored), end; entry != end; entry.increment(ignored)) {
    const std::string name = entry->path().filename().string();
    if (!name.starts_with(prefix) || fs::is_symlink(entry->symlink_status(ignored))) continue;
    if (abandoned(entry->path(), writer_of(name, prefix.size()))) fs::remove_all(entry->path(), ignored);
    if (ignored) return;
  }
}

void sync_directory(const fs::path& directory) {
  const int descriptor = ::open(directory.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (descriptor < 0) return;  // written, but not listable by us: nothing more can be done
  const bool failed = ::fsync(descriptor) != 0 && errno != EINVAL && errno != ENOTSUP && errno != EROFS;
  const int reason = errno;
  ::close(descriptor);
  if (failed) throw_output_error(directory, "write into this directory", reason);
}

void check_output_file(const fs::path& given) {
  const fs::path target = resolved_target(given);
  std::error_code failure;
  if (fs::is_directory(target, failure)) throw_output_error(target, "write this file", EISDIR);
  remove_leftovers(target);
  // The only sure test of permissions, quotas and read-only mounts is to create something.
  fs::path probe;
  const int descriptor = create_partial(target, false, probe);
  ::unlink(probe.c_str());
  ::close(descriptor);
}

void require_disk_space(const std::vector<ExpectedOutput>& outputs) {
  std::map<dev_t, std::int64_t> needed;
  for (const ExpectedOutput& output : outputs) {
    fs::path folder = resolved_target(output.path).parent_path();
    struct stat status;
    while (::stat(folder.c_str(), &status) != 0 && folder.has_relative_path()) folder = folder.parent_path();
    struct statvfs system;
    if (::stat(folder.c_str(), &status) != 0 || ::statvfs(folder.c_str(), &system) != 0) continue;
    const std::int64_t sum = needed[status.st_dev] += output.bytes;
    const std::uint64_t free_bytes = std::uint64_t{system.f_bavail} * system.f_frsize;
    if (free_bytes < static_cast<std::uint64_t>(sum))
      throw WriteError({output.path.string(), format_bytes(sum) + " of free space for the output",
                        format_bytes(static_cast<std::int64_t>(free_bytes)), remedy_for(ENOSPC)});
  }
}

AtomicFile::AtomicFile(fs::path target) : target_(std::move(target)) {
  struct stat status;
  const bool exists = !target_.empty() && ::stat(target_.c_str(), &status) == 0;
  if (exists && !S_ISREG(status.st_mode)) {
    file_ = std::make_unique<OutputFile>(target_);
    return;
  }
  target_ = resolved_target(target_);
  remove_leftovers(target_);
  const int descriptor = create_partial(target_, false, partial_);
  file_ = std::make_unique<OutputFile>(target_, descriptor);
  if (exists) (void)::fchmod(descriptor, status.st_mode & 07777);
}

AtomicFile::~AtomicFile() {
  if (!partial_.empty()) ::unlink(partial_.c_str());
}

void AtomicFile::commit() {
  if (partial_.empty()) return file_->close_synced();
  file_->sync();
  if (::rename(partial_.c_str(), target_.c_str()) != 0) throw_output_error(target_, "replace this file", errno);
  partial_.clear();
  file_->close_synced();
  sync_directory(target_.parent_path());
}

}  // namespace espalier
