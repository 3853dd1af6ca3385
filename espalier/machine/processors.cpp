#include "espalier/machine/processors.h"

#include <sched.h>

#include <algorithm>
#include <charconv>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <optional>

#include "espalier/machine/control_group.h"

namespace espalier {
namespace {

struct Quota {
  std::int64_t quota, period;  // microseconds of processor time in microseconds of time
};

// Version 2: cpu.max holds "quota period" or "max period"; version 1: two files, -1 for none.
std::optional<Quota> quota_of(const std::filesystem::path& group) {
  Quota q{};
  std::ifstream both(group / "cpu.max");
  if (both >> q.quota >> q.period) return q;
  const auto quota = number_in(group / "cpu.cfs_quota_us"), period = number_in(group / "cpu.cfs_period_us");
  if (!quota || !period) return std::nullopt;
  return Quota{*quota, *period};
}

int threads_of_environment() {
  const char* text = std::getenv("OMP_NUM_THREADS");  // may be a list, one number a nesting level: the first counts
  int threads = 0;
  if (text) std::from_chars(text, text + std::strlen(text), threads);
  return threads;
}

}  // namespace

int processor_quota(const std::filesystem::path& root) {
  std::int64_t least = 0;
  for (const auto& group : control_group_directories(root, "cpu")) {
    const auto q = quota_of(group);
    if (!q || q->quota <= 0 || q->period <= 0) continue;
    const std::int64_t processors = (q->quota + q->period - 1) / q->period;
    least = least == 0 ? processors : std::min(least, processors);
  }
  return static_cast<int>(least);
}

int usable_threads(int processes) {
  if (const int threads = threads_of_environment(); threads > 0) return threads;
  cpu_set_t mask;
  CPU_ZERO(&mask);
  int threads = sched_getaffinity(0, sizeof mask, &mask) == 0 ? CPU_COUNT(&mask) : 1;
  if (const int quota = processor_quota(); quota > 0) threads = std::min(threads, quota);
  return std::max(1, threads / processes);
}

}  // namespace espalier
