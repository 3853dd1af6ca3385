#include "espalier/metrics/run_log.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <limits>
#include <sstream>

#include "espalier/base/error.h"

namespace espalier {
namespace {

class RunLogFile : public ::testing::Test {
 protected:
  void SetUp() override {
    path_ = std::filesystem::temp_directory_path() / ("espalier_log_" + std::to_string(getpid()) + ".jsonl");
    std::filesystem::remove(path_);
  }
  void TearDown() override { std::filesystem::remove(path_); }
  std::string content() const {
    std::ostringstream text;
    text << std::ifstream(path_).rdbuf();
    return text.str();
  }
  std::filesystem::path path_;
};

TEST_F(RunLogFile, EveryLineIsOnDiskAtOnceAndParses) {
  RunLog log(path_);
  log.write({{"step", 1}, {"loss", 0.5}});
  EXPECT_EQ(content(), "{\"step\":1,\"loss\":0.5}\n");
  log.write({{"loss", std::numeric_limits<double>::quiet_NaN()}});
  EXPECT_EQ(content(), "{\"step\":1,\"loss\":0.5}\n{\"loss\":null}\n");
}

TEST_F(RunLogFile, AppendsAfterTheLastWholeLine) {
  std::ofstream(path_) << "{\"step\":1}\n{\"ste";
  RunLog(path_).write({{"step", 2}});
  EXPECT_EQ(content(), "{\"step\":1}\n{\"step\":2}\n");
  RunLog(path_).write({{"step", 3}});
  EXPECT_EQ(content(), "{\"step\":1}\n{\"step\":2}\n{\"step\":3}\n");
}

TEST_F(RunLogFile, AFileThatCannotBeWrittenIsAnOptionError) {
  EXPECT_THROW(RunLog(path_ / "below" / "a" / "file"), OptionError);
  if (std::filesystem::exists("/dev/full")) {
    RunLog log("/dev/full");
    EXPECT_THROW(log.write({{"step", 1}}), OptionError);
  }
}

}  // namespace
}  // namespace espalier
