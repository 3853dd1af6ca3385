#include "espalier/loop/run_folder.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <fstream>
#include <functional>

#include "espalier/base/error.h"
#include "espalier/checkpoint/atomic_output.h"
#include "espalier/options/options_json.h"

namespace espalier {
namespace {

namespace fs = std::filesystem;

class RunFolderTest : public testing::Test {
 protected:
  RunFolderTest() : root_(fs::temp_directory_path() / ("run_folder_" + std::to_string(::getpid()))) {
    fs::remove_all(root_);
  }
  ~RunFolderTest() override { fs::remove_all(root_); }

  fs::path root_;
};

TEST_F(RunFolderTest, IsMadeWhereThereIsNoneAndTakenAgain) {
  {
    const RunFolder folder(root_);
    EXPECT_FALSE(RunFolder::is_run(root_));
    folder.write_description({{"options", Json::object()}});
  }
  EXPECT_TRUE(RunFolder::is_run(root_));
  EXPECT_TRUE(RunFolder(root_).description().contains("options"));
}

TEST_F(RunFolderTest, AFolderWithOtherContentIsRefusedAndLeftAsItIs) {
  fs::create_directories(root_);
  std::ofstream(root_ / "thesis.txt") << "three years of work";
  EXPECT_THROW(RunFolder folder(root_), OptionError);
  EXPECT_TRUE(fs::exists(root_ / "thesis.txt"));
}

TEST_F(RunFolderTest, WhatAKilledStartLeftIsNoOtherContent) {
  fs::create_directories(root_);
  std::ofstream(root_ / ".run.json.espalier-partial-1") << "{";
  EXPECT_NO_THROW(RunFolder folder(root_));
}

TEST_F(RunFolderTest, TwoProcessesDoNotWorkOnOneRun) {
  const RunFolder folder(root_);
  EXPECT_THROW(RunFolder other(root_), OptionError);
}

TEST_F(RunFolderTest, TheNewestCheckpointIsTheLastCompleteOne) {
  const RunFolder folder(root_);
  EXPECT_FALSE(folder.newest_checkpoint());
  fs::create_directories(root_ / "checkpoints");
  for (const std::int64_t step : {0, 9, 10}) AtomicDirectory(folder.checkpoint(step)).commit();
  fs::create_directories(folder.checkpoint(11));  // no manifest: not complete
  EXPECT_EQ(folder.newest_checkpoint(), 10);
}

Json recorded(const std::function<void(Options&)>& change) {
  Options options;
  change(options);
  return options_to_json(options, 'l');
}

TEST(ContinuedOptions, AreThoseOfTheRunWhereNothingElseIsGiven) {
  const Json run = recorded([](Options& o) { o.lr = 0.5, o.steps = 7, o.filter_groups = true, o.n = "4"; });
  const Options options = continued_options(Options(), run, "run.json");
  EXPECT_EQ(options_to_json(options, 'l'), run);
}

TEST(ContinuedOptions, TakeNewStepsButNoNewLearningRate) {
  const Json run = recorded([](Options& o) { o.lr = 0.5, o.steps = 7; });
  Options given;
  given.steps = 20;
  given.lr = 0.5;
  EXPECT_EQ(continued_options(given, run, "run.json").steps, 20);
  given.lr = 0.25;
  try {
    (void)continued_options(given, run, "run.json");
    FAIL();
  } catch (const OptionError& error) {
    EXPECT_EQ(error.text().where, "--lr");
    EXPECT_EQ(error.text().got, "0.25");
  }
}

}  // namespace
}  // namespace espalier
