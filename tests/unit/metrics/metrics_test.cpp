#include "espalier/metrics/metrics.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <fstream>
#include <sstream>

#include "espalier/base/error.h"

namespace espalier {
namespace {

namespace fs = std::filesystem;

class RunMetricsTest : public testing::Test {
 protected:
  RunMetricsTest() : folder_(fs::temp_directory_path() / ("run_metrics_" + std::to_string(::getpid()))) {
    fs::remove_all(folder_);
    fs::create_directories(folder_);
  }
  ~RunMetricsTest() override { fs::remove_all(folder_); }

  fs::path file() const { return folder_ / "metrics.jsonl"; }
  std::string content() const {
    std::stringstream text;
    text << std::ifstream(file()).rdbuf();
    return text.str();
  }
  static Json line(std::int64_t step) { return {{"kind", "evaluation"}, {"step", step}, {"accuracy", 0.5}}; }

  fs::path folder_;
};

TEST_F(RunMetricsTest, AContinuedRunCutsWhatCameAfterItsCheckpoint) {
  std::int64_t at_checkpoint = 0;
  {
    RunMetrics metrics(file(), 0, 0, {});
    metrics.write(line(1));
    at_checkpoint = metrics.bytes();
    metrics.write(line(2));
  }
  std::ofstream(file(), std::ios::app) << "{\"kind\": \"eval";  // killed while it wrote
  std::vector<std::int64_t> seen;
  {
    RunMetrics metrics(file(), at_checkpoint, 2, [&](const Json& each) { seen.push_back(each["step"]); });
    EXPECT_EQ(metrics.bytes(), at_checkpoint);
    metrics.write(line(2));
  }
  EXPECT_EQ(content(), line(1).dump() + "\n" + line(2).dump() + "\n");
  EXPECT_EQ(seen, std::vector<std::int64_t>{2});
}

TEST_F(RunMetricsTest, AFileShorterThanTheCheckpointKnowsIsAnError) {
  std::ofstream(file()) << "{}\n";
  EXPECT_THROW(RunMetrics(file(), 100, 0, {}), InputError);
  EXPECT_EQ(content(), "{}\n");
}

TEST_F(RunMetricsTest, EveryLineGoesToTensorBoardToo) {
  RunMetrics metrics(file(), 0, 0, {});
  metrics.write(line(1));
  std::uintmax_t bytes = 0;
  for (const fs::directory_entry& entry : fs::directory_iterator(folder_))
    if (entry.path().filename().string().starts_with("events.out.tfevents.")) {
      std::stringstream text;
      text << std::ifstream(entry.path(), std::ios::binary).rdbuf();
      bytes += text.str().size();
      EXPECT_NE(text.str().find("val/accuracy"), std::string::npos);
    }
  EXPECT_GT(bytes, 0u);
}

}  // namespace
}  // namespace espalier
