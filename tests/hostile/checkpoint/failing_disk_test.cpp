// Disks that are full, simulated by a limit on the size of files (any user) and by a tiny file system (root).
#include <signal.h>
#include <sys/mount.h>
#include <sys/resource.h>

#include "espalier/base/atomic_file.h"
#include "tests/hostile/checkpoint/save_version.h"

namespace espalier::test {
namespace {

namespace fs = std::filesystem;

// While it lives, a file that grows beyond `bytes` fails with EFBIG.
class FileSizeLimit {
 public:
  explicit FileSizeLimit(rlim_t bytes) : handler_(::signal(SIGXFSZ, SIG_IGN)) {
    ::getrlimit(RLIMIT_FSIZE, &before_);
    const rlimit limit{bytes, before_.rlim_max};
    ::setrlimit(RLIMIT_FSIZE, &limit);
  }
  ~FileSizeLimit() {
    ::setrlimit(RLIMIT_FSIZE, &before_);
    ::signal(SIGXFSZ, handler_);
  }

 private:
  rlimit before_{};
  sighandler_t handler_;
};

struct FailingDisk : ::testing::Test {
  TemporaryDirectory folder;

  void SetUp() override {
    fs::create_directory(folder / "source");
    write_text(folder / "source" / "config.json", "{}");
  }
  std::int64_t saved_step(const fs::path& directory) const { return read_run_state(directory).step; }
};

TEST_F(FailingDisk, AFailedSaveLeavesTheOldVersionAndNothingElse) {
  save_version(folder / "source", folder / "out", 1);
  const rlim_t largest = fs::file_size(folder / "out" / "espalier" / "state.safetensors");
  for (const rlim_t limit : {rlim_t{0}, rlim_t{1}, rlim_t{100}, largest / 3, largest - 1}) {
    const FileSizeLimit full(limit);
    const std::string text = message_of<OptionError>([&] { save_version(folder / "source", folder / "out", 2); });
    EXPECT_HOLDS(text, "File too large");
    EXPECT_EQ(entries_in(folder.path()), 2u) << limit;
    EXPECT_EQ(saved_step(folder / "out"), 1) << limit;
  }
  save_version(folder / "source", folder / "out", 2);
  EXPECT_EQ(saved_step(folder / "out"), 2);
}

TEST_F(FailingDisk, AFailedFileLeavesTheOldOneAndNothingElse) {
  const ParameterTable table(saved_shape());
  const std::vector<float> values(static_cast<std::size_t>(table.size()), 1.0f);
  write_text(folder / "gradients", "old");
  {
    const FileSizeLimit full(5000);
    EXPECT_THROW(write_named_tensors(folder / "gradients", table, DType::float32, values.data()), OptionError);
  }
  EXPECT_EQ(read_text(folder / "gradients"), "old");
  EXPECT_EQ(entries_in(folder.path()), 2u);
}

TEST_F(FailingDisk, AFullFileSystemIsNamedWithItsRemedy) {
  const fs::path small = folder / "small";
  fs::create_directory(small);
  if (::mount("tmpfs", small.c_str(), "tmpfs", 0, "size=256k") != 0)
    GTEST_SKIP() << "a small file system cannot be mounted here: " << std::strerror(errno);
  try {
    const std::string text = message_of<OptionError>([&] { save_version(folder / "source", small / "out", 1); });
    EXPECT_HOLDS(text, "No space left on device. Free space there");
    EXPECT_TRUE(fs::is_empty(small));
    EXPECT_HOLDS(message_of<OptionError>([&] { check_output_directory(small); }), "a mount point");
  } catch (const std::exception& error) {
    ADD_FAILURE() << error.what();
  }
  EXPECT_EQ(::umount(small.c_str()), 0);
}

}  // namespace
}  // namespace espalier::test
