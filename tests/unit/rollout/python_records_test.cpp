// The pipe to the Python package: what the child prints is read, what it says is told, and it never outlives the
// reading.
#include "espalier/rollout/python_records.h"

#include <gtest/gtest.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <limits>
#include <stdexcept>

#include "espalier/rollout/reader.h"
#include "tests/unit/rollout/expect_error.h"

namespace espalier {
namespace {

namespace fs = std::filesystem;
using testing::expect_error;

class PythonRecordsTest : public ::testing::Test {
 protected:
  void SetUp() override {
    folder_ = fs::temp_directory_path() / ("espalier_python_records_" + std::to_string(::getpid()));
    fs::create_directories(folder_);
    dump_ = write("dump.pkl", "\x80\x04.");
    if (const char* const named = std::getenv("ESPALIER_PYTHON")) before_ = named;
  }
  void TearDown() override {
    if (before_.empty())
      ::unsetenv("ESPALIER_PYTHON");
    else
      ::setenv("ESPALIER_PYTHON", before_.c_str(), 1);
    fs::remove_all(folder_);
    EXPECT_EQ(::waitpid(-1, nullptr, WNOHANG), -1);  // no child is left, running or not waited for
    EXPECT_EQ(errno, ECHILD);
  }

  std::string write(const std::string& name, const std::string& bytes) const {
    std::ofstream(folder_ / name, std::ios::binary) << bytes;
    return folder_ / name;
  }
  // A script that stands for Python.
  void use_script(const std::string& body) const {
    const std::string path = write("python", "#!/bin/sh\n" + body);
    ::chmod(path.c_str(), 0700);
    ::setenv("ESPALIER_PYTHON", path.c_str(), 1);
  }
  template <class T>
  void write_numbers(const fs::path& file, const std::vector<T>& numbers) const {
    std::ofstream out(file, std::ios::binary);
    for (const T number : numbers) out.write(reinterpret_cast<const char*>(&number), sizeof(T));
  }

  fs::path folder_;
  std::string dump_, before_;
};

const std::string kRecord = R"({"prompt_ids":[1],"response_ids":[2,3],"step":4})";
const std::string kFine = R"(echo '{"format":"a dump","notes":["one","two"]}' >&2)";

TEST_F(PythonRecordsTest, WhatTheChildPrintsIsRead) {
  use_script("[ \"$1 $2 $3 $4\" = \"-m espalier.records -- " + dump_ + "\" ] || exit 9\n" + "echo '" + kRecord +
             "'\necho '" + kRecord + "'\n" + kFine);
  const RolloutFile file = read_rollouts({dump_});
  ASSERT_EQ(file.rollouts.size(), 2u);
  EXPECT_EQ(file.rollouts[1].response_ids, (std::vector<std::int32_t>{2, 3}));
  EXPECT_EQ(file.rollouts[1].where, dump_ + ":2");
  EXPECT_EQ(file.format, "a dump");
  EXPECT_EQ(file.notes, (std::vector<std::string>{"one", "two"}));
}

TEST_F(PythonRecordsTest, TheChildsErrorsAreOurs) {
  const std::string error = R"(echo '{"where":"dump.pkl: sample 3","expected":"a","got":"b","remedy":"c"}' >&2; )";
  use_script("echo warning >&2; " + error + "exit 3");
  expect_error<InputError>([&] { read_rollouts({dump_}); }, "dump.pkl: sample 3", "expected a, got b");
  use_script("echo '" + kRecord + "'; " + error + "exit 4");
  expect_error<UnsupportedError>([&] { read_rollouts({dump_}); }, "dump.pkl: sample 3", "expected a, got b");
}

TEST_F(PythonRecordsTest, AChildThatDiesIsNamedWithItsLastWords) {
  use_script("echo '" + kRecord + "'; kill -9 $$");
  expect_error<UnsupportedError>([&] { read_rollouts({dump_}); }, dump_, "signal 9");
  use_script("printf 'Traceback:\\n  deep\\nMemoryError: no more\\n' >&2; exit 1");
  expect_error<UnsupportedError>([&] { read_rollouts({dump_}); }, dump_, "exit status 1: MemoryError: no more");
  use_script("echo '" + kRecord + "'; exit 0");  // complete, but without the object that says so
  expect_error<UnsupportedError>([&] { read_rollouts({dump_}); }, dump_, "the format and notes");
}

TEST_F(PythonRecordsTest, AMissingPythonIsSaidAndHowToNameOne) {
  ::setenv("ESPALIER_PYTHON", "/absent/python", 1);
  expect_error<UnsupportedError>([&] { read_rollouts({dump_}); }, dump_, "/absent/python: No such file");
  expect_error<UnsupportedError>([&] { read_rollouts({dump_}); }, dump_, "Set ESPALIER_PYTHON");
}

TEST_F(PythonRecordsTest, ABadRecordIsRefusedWithItsLineAndTheChildEnds) {
  use_script("echo '" + kRecord + R"('; echo '{"prompt_ids":[],"response_ids":[]}'; exec sleep 1000)");
  expect_error<InputError>([&] { read_rollouts({dump_}); }, dump_ + ":2: prompt_ids", "at least one token");
}

TEST_F(PythonRecordsTest, NeitherStreamStopsTheOther) {
  use_script("i=0; while [ $i -lt 3000 ]; do printf '%0512d\\n' 0 >&2; echo '" + kRecord + "'; i=$((i+1)); done; " +
             kFine);
  EXPECT_EQ(read_rollouts({dump_}).rollouts.size(), 3000u);  // 1.5 MB of stderr, more than any pipe holds
}

TEST_F(PythonRecordsTest, AStreamThatIsDroppedTakesItsChildAlong) {
  use_script("exec sleep 1000");
  { const PythonRecords stream(dump_, nullptr); }
  int calls = 0;
  PythonRecords stream(dump_, [&] {
    if (++calls == 2) throw std::runtime_error("interrupted");
  });
  char byte = 0;
  EXPECT_THROW(stream.read(&byte, 1), std::runtime_error);  // while nothing comes
}

TEST_F(PythonRecordsTest, PythonReadsAPackedFolder) {
  const fs::path packed = folder_ / "packed";
  fs::create_directories(packed);
  const float none = std::numeric_limits<float>::quiet_NaN();
  write_numbers<std::int64_t>(packed / "tokens.pt", {5, 6, 7, 8, 9, -100});
  write_numbers<std::int64_t>(packed / "group_ids.pt", {1, 1, 2, 2, 3, -1});
  write_numbers<std::int64_t>(packed / "parent_ids.pt", {1, 1, 1, 1, 1, -1});
  write_numbers<std::int64_t>(packed / "input_pos.pt", {0, 1, 2, 3, 2, 0});
  write_numbers<std::uint8_t>(packed / "assistant_mask.pt", {0, 0, 1, 1, 1, 0});
  write_numbers<float>(packed / "logprobs.pt", {none, none, -1, -2, -0.5F, none});
  write_numbers<float>(packed / "advantages.pt", {0, 0, 1, 1, -1, 0});
  write_numbers<float>(packed / "weights.pt", {0, 0, 1, 0.5F, 1, 0});
  RolloutFile file;
  try {
    file = read_rollouts({packed});
  } catch (const UnsupportedError& error) {
    if (error.text().got.find("No such file") != std::string::npos)
      GTEST_SKIP() << "there is no Python: " << error.what();
    throw;
  }
  ASSERT_EQ(file.rollouts.size(), 2u);
  EXPECT_EQ(file.format, "ART packed tensors");
  EXPECT_EQ(file.rollouts[0].prompt_ids, (std::vector<std::int32_t>{5, 6}));
  EXPECT_EQ(file.rollouts[0].response_ids, (std::vector<std::int32_t>{7, 8}));
  EXPECT_EQ(file.rollouts[0].advantages, (std::vector<double>{1, 0.5}));
  EXPECT_EQ(file.rollouts[1].prompt_ids, (std::vector<std::int32_t>{5, 6}));
  EXPECT_EQ(file.rollouts[1].response_ids, (std::vector<std::int32_t>{9}));
  EXPECT_EQ(file.rollouts[1].old_logprobs, (std::vector<double>{-0.5}));
}

TEST_F(PythonRecordsTest, AFolderOfTrainDataIsReadByStep) {
  const auto sample = [](int token) {
    return R"({"token_ids":[1,)" + std::to_string(token) + R"(],"token_loss_mask":[0,1],"rewards":1})" + "\n";
  };
  write("train_data_step10.jsonl", sample(10));
  write("train_data_step9.jsonl", sample(9));
  fs::remove(dump_);
  const RolloutFile file = read_rollouts({folder_});
  ASSERT_EQ(file.rollouts.size(), 2u);
  EXPECT_EQ(file.rollouts[0].step, 9);
  EXPECT_EQ(file.rollouts[1].response_ids, (std::vector<std::int32_t>{10}));
}

}  // namespace
}  // namespace espalier
