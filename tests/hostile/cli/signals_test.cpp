// Interrupts, broken pipes and full disks.
#include <fcntl.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/stat.h>
#include <unistd.h>

#include <chrono>
#include <thread>

#include "espalier/base/json.h"
#include "tests/hostile/cli/program_run.h"

namespace espalier::testing {
namespace {

// A pipe in the place of an input file: the program waits in it until somebody writes. Returns its writing end once the
// program has opened the other.
int open_fed_pipe(const std::filesystem::path& path) {
  for (int i = 0; i < 3000; ++i) {
    const int file = open(path.c_str(), O_WRONLY | O_NONBLOCK);
    if (file >= 0) return file;
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  }
  return -1;
}

TEST(Signals, AnInterruptedConvertLeavesNothing) {
  const Folder folder;
  const std::string pipe = (folder.path() / "pipe.jsonl").string();
  ASSERT_EQ(mkfifo(pipe.c_str(), 0600), 0);
  Started program(folder.path(), {"convert", "pipe.jsonl", "out.jsonl"});
  const int feed = open_fed_pipe(pipe);
  ASSERT_GE(feed, 0);
  kill(program.pid(), SIGINT);
  std::this_thread::sleep_for(std::chrono::milliseconds(50));
  kill(program.pid(), SIGINT);  // the second ends it wherever it is
  const Outcome outcome = program.wait();
  close(feed);
  EXPECT_EQ(outcome.code, 130) << outcome.signal << outcome.err;
  EXPECT_EQ(folder.names(), (std::vector<std::string>{"pipe.jsonl"}));
}

TEST(Signals, OneInterruptIsEnoughWhereWorkGoesOn) {
  const Folder folder;
  const std::string pipe = (folder.path() / "pipe.jsonl").string();
  ASSERT_EQ(mkfifo(pipe.c_str(), 0600), 0);
  Started program(folder.path(), {"convert", "--json", "pipe.jsonl", "out.jsonl"});
  const int feed = open_fed_pipe(pipe);
  ASSERT_GE(feed, 0);
  kill(program.pid(), SIGTERM);
  std::this_thread::sleep_for(std::chrono::milliseconds(50));
  const std::string line = "{\"prompt_ids\":[1],\"response_ids\":[2]}\n";
  EXPECT_EQ(write(feed, line.data(), line.size()), static_cast<ssize_t>(line.size()));
  close(feed);
  const Outcome outcome = program.wait();
  EXPECT_EQ(outcome.code, 143) << outcome.signal << outcome.err;
  EXPECT_TRUE(Json::accept(outcome.out)) << outcome.out;
  EXPECT_EQ(folder.names(), (std::vector<std::string>{"pipe.jsonl"}));
}

TEST(Signals, AReaderThatLeftEndsTheProgramQuietly) {
  const Folder folder;
  const Outcome killed = Started(folder.path(), {"train", "--help"}, Output::closed_pipe).wait();
  EXPECT_EQ(killed.signal, SIGPIPE);
  EXPECT_EQ(killed.err, "");
  const Outcome told = Started(folder.path(), {"train", "--help"}, Output::closed_pipe, true).wait();
  EXPECT_EQ(told.code, 2);
  EXPECT_NE(told.err.find("stdout"), told.err.npos) << told.err;
}

TEST(Output, AFullDiskIsReported) {
  const Folder folder;
  if (!std::filesystem::exists("/dev/full")) GTEST_SKIP() << "this system has no /dev/full";
  const Outcome outcome = Started(folder.path(), {"--help"}, Output::full_disk).wait();
  EXPECT_EQ(outcome.code, 2);
  EXPECT_NE(outcome.err.find("stdout"), outcome.err.npos) << outcome.err;
}

}  // namespace
}  // namespace espalier::testing
