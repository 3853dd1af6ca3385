#include "espalier/machine/memory.h"

#include <algorithm>
#include <fstream>
#include <limits>
#include <string>
#ifdef __GLIBC__
#include <malloc.h>
#endif

#include "espalier/machine/control_group.h"

namespace espalier {
namespace {

// A member of a file of lines "Name:   123 kB" or "name 123"; -1 where it is missing.
std::int64_t member_of(const std::filesystem::path& file, const std::string& name) {
  std::ifstream stream(file);
  for (std::string word; stream >> word;) {
    std::int64_t value = 0;
    if (word == name && stream >> value) return value;
    stream.clear();
    stream.ignore(std::numeric_limits<std::streamsize>::max(), '\n');
  }
  return -1;
}

constexpr std::int64_t kNoLimit = std::numeric_limits<std::int64_t>::max();

std::int64_t kilobytes(std::int64_t value, std::int64_t missing) { return value < 0 ? missing : value * 1024; }

// The bytes of a control group below its limit. Version 2: memory.max, memory.current; version 1: *_in_bytes.
std::int64_t left_in(const std::filesystem::path& group) {
  auto limit = number_in(group / "memory.max"), used = number_in(group / "memory.current");
  if (!limit) limit = number_in(group / "memory.limit_in_bytes");
  if (!used) used = number_in(group / "memory.usage_in_bytes");
  if (!limit || !used) return kNoLimit;
  // Version 1 counts the pages of the groups below only under the total_ name.
  std::int64_t file_pages = member_of(group / "memory.stat", "total_inactive_file");
  if (file_pages < 0) file_pages = member_of(group / "memory.stat", "inactive_file");
  // The counters are read one after another: pages of files may by then be more than all that is used.
  return std::max<std::int64_t>(0, *limit - std::max<std::int64_t>(0, *used - std::max<std::int64_t>(0, file_pages)));
}

}  // namespace

std::int64_t resident_bytes() { return kilobytes(member_of("/proc/self/status", "VmRSS:"), 0); }

std::int64_t peak_resident_bytes() { return kilobytes(member_of("/proc/self/status", "VmHWM:"), 0); }

void return_freed_memory() {
#ifdef __GLIBC__
  malloc_trim(0);
#endif
}

std::int64_t available_bytes_below(const std::filesystem::path& root) {
  std::int64_t available = kilobytes(member_of(root / "proc/meminfo", "MemAvailable:"), kNoLimit);
  for (const auto& group : control_group_directories(root, "memory")) available = std::min(available, left_in(group));
  return available;
}

std::int64_t available_bytes() { return available_bytes_below("/"); }

}  // namespace espalier
