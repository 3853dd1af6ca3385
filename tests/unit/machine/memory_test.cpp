#include "espalier/machine/memory.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <cstdlib>
#include <fstream>
#include <vector>

#include "espalier/machine/processors.h"

namespace espalier {
namespace {

namespace fs = std::filesystem;

// A small /proc and /sys below a folder of its own.
class SystemFiles : public ::testing::Test {
 protected:
  void SetUp() override {
    root_ = fs::temp_directory_path() / ("espalier_system_" + std::to_string(getpid()));
    fs::remove_all(root_);
  }
  void TearDown() override { fs::remove_all(root_); }
  void put(const std::string& path, const std::string& text) {
    fs::create_directories((root_ / path).parent_path());
    std::ofstream(root_ / path) << text;
  }
  fs::path root_;
};

// Once glibc has freed a large block it keeps smaller ones for itself.
TEST(Memory, FreedBlocksGoBackToTheSystem) {
#if !defined(__GLIBC__) || defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
  GTEST_SKIP() << "another allocator";
#endif
  constexpr std::int64_t kBlock = 1 << 20, kBlocks = 24;
  { const std::vector<char> large(kBlocks * kBlock, 1); }
  std::vector<char> last;
  {
    std::vector<std::vector<char>> blocks;
    for (std::int64_t i = 0; i < kBlocks; ++i) blocks.emplace_back(kBlock, 1);
    last.assign(kBlock, 1);  // above the others, so that they do not leave by themselves
  }
  const std::int64_t before = resident_bytes();
  return_freed_memory();
  EXPECT_LE(resident_bytes(), before - kBlocks * kBlock * 9 / 10);
}

TEST(Memory, ThePeakFollowsWhatIsTouched) {
  constexpr std::int64_t kBytes = 64 << 20;
  const std::int64_t before = resident_bytes();
  ASSERT_GT(before, 0);
  {
    std::vector<char> touched(kBytes, 1);
    // Pages count only once touched, and one read keeps the compiler from leaving the block out.
    ASSERT_EQ(touched[kBytes / 2], 1);
    EXPECT_GE(resident_bytes() - before, kBytes * 9 / 10);
  }
  EXPECT_GE(peak_resident_bytes() - before, kBytes * 9 / 10);
}

TEST(Memory, SomethingIsAvailable) { EXPECT_GT(available_bytes(), 1 << 20); }

TEST_F(SystemFiles, WithoutAGroupTheMachineDecides) {
  put("proc/meminfo", "MemTotal:       16000 kB\nMemFree:         1000 kB\nMemAvailable:    8000 kB\n");
  EXPECT_EQ(available_bytes_below(root_), 8000 * 1024);
}

TEST_F(SystemFiles, TheTightestEnclosingGroupOfVersion2Decides) {
  put("proc/meminfo", "MemAvailable:    8000 kB\n");
  put("proc/self/cgroup", "0::/outer/inner\n");
  put("sys/fs/cgroup/outer/memory.max", "3000000\n");
  put("sys/fs/cgroup/outer/memory.current", "2500000\n");
  put("sys/fs/cgroup/outer/memory.stat", "anon 1000\ninactive_file 100000\n");
  put("sys/fs/cgroup/outer/inner/memory.max", "max\n");
  put("sys/fs/cgroup/outer/inner/memory.current", "2000000\n");
  EXPECT_EQ(available_bytes_below(root_), 600000);
}

TEST_F(SystemFiles, AFullGroupLeavesNothing) {
  put("proc/meminfo", "MemAvailable:    8000 kB\n");
  put("proc/self/cgroup", "0::/\n");
  put("sys/fs/cgroup/memory.max", "1000\n");
  put("sys/fs/cgroup/memory.current", "2000\n");
  EXPECT_EQ(available_bytes_below(root_), 0);
}

TEST_F(SystemFiles, AGroupOfVersion1Decides) {
  put("proc/meminfo", "MemAvailable:    8000 kB\n");
  put("proc/self/cgroup", "5:cpu,cpuacct:/job\n4:memory:/job\n");
  put("sys/fs/cgroup/memory/job/memory.limit_in_bytes", "5000000\n");
  put("sys/fs/cgroup/memory/job/memory.usage_in_bytes", "1000000\n");
  put("sys/fs/cgroup/memory/job/memory.stat", "inactive_file 5\ntotal_inactive_file 10\n");
  EXPECT_EQ(available_bytes_below(root_), 4000010);
}

// An unlimited group of version 1 says nearly the largest number there is, and its counters are read one after another.
TEST_F(SystemFiles, AGroupWithoutALimitNeverDecides) {
  put("proc/meminfo", "MemAvailable:    8000 kB\n");
  put("proc/self/cgroup", "4:memory:/job\n");
  put("sys/fs/cgroup/memory/job/memory.limit_in_bytes", "9223372036854771712\n");
  put("sys/fs/cgroup/memory/job/memory.usage_in_bytes", "1000000\n");
  put("sys/fs/cgroup/memory/job/memory.stat", "total_inactive_file 1100000\n");
  EXPECT_EQ(available_bytes_below(root_), 8000 * 1024);
}

TEST_F(SystemFiles, AQuotaIsRoundedUpToProcessors) {
  put("proc/self/cgroup", "0::/job\n");
  EXPECT_EQ(processor_quota(root_), 0);
  put("sys/fs/cgroup/job/cpu.max", "150000 100000\n");
  EXPECT_EQ(processor_quota(root_), 2);
  put("sys/fs/cgroup/cpu.max", "max 100000\n");
  EXPECT_EQ(processor_quota(root_), 2);
  put("proc/self/cgroup", "5:cpu,cpuacct:/job\n");
  put("sys/fs/cgroup/cpu/job/cpu.cfs_quota_us", "300000\n");
  put("sys/fs/cgroup/cpu/job/cpu.cfs_period_us", "100000\n");
  EXPECT_EQ(processor_quota(root_), 3);
}

TEST(Processors, TheVariableDecidesWhereItIsSet) {
  const char* before = std::getenv("OMP_NUM_THREADS");
  const std::string kept = before ? before : "";
  setenv("OMP_NUM_THREADS", "3,2", 1);
  EXPECT_EQ(usable_threads(), 3);
  setenv("OMP_NUM_THREADS", "none", 1);
  EXPECT_GE(usable_threads(), 1);
  unsetenv("OMP_NUM_THREADS");
  EXPECT_GE(usable_threads(), 1);
  if (before) setenv("OMP_NUM_THREADS", kept.c_str(), 1);
}

}  // namespace
}  // namespace espalier
