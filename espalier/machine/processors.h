// How many threads this process may run at once.
#pragma once

#include <filesystem>

namespace espalier {

// OMP_NUM_THREADS where it is set; else the processors of the affinity mask, at most what the control group's processor
// quota pays for (rounded up), shared with the processes of the same run on this machine. At least 1.
int usable_threads(int processes = 1);

// The quota of the control groups of this process in whole processors, rounded up; 0: none. `root` for tests.
int processor_quota(const std::filesystem::path& root = "/");

}  // namespace espalier
