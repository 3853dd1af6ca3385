#include "espalier/loop/reward.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>

#include "espalier/base/error.h"
#include "espalier/loop/python_process.h"

namespace espalier {
namespace {

const Vocabulary& words() { return Vocabulary::built_in(); }

class PythonReward : public testing::Test {
 protected:
  PythonReward() : file_(std::filesystem::temp_directory_path() / ("reward_" + std::to_string(::getpid()) + ".py")) {}
  ~PythonReward() override { std::filesystem::remove(file_); }

  std::unique_ptr<Reward> reward(const std::string& body) {
    std::ofstream(file_) << "def compute_score(data_source, solution_str, ground_truth, extra_info):\n" << body;
    return make_reward(file_.string(), "retrieval");
  }
  double score(Reward& reward, const std::string& response) {
    return reward.of({words().ids("otter teal ; ? otter", ""), words().ids("teal", "")}, words().ids(response, ""));
  }
  std::string message(Reward& reward, const std::string& response = "teal <end>") {
    try {
      (void)score(reward, response);
    } catch (const InputError& error) {
      EXPECT_EQ(error.text().where, file_.string());
      return error.text().got;
    }
    return "no error";
  }

  std::filesystem::path file_;
};

TEST_F(PythonReward, GetsTheTextsAndTheirContext) {
  const auto r = reward(
      "    assert data_source == 'espalier/retrieval' and ground_truth == 'teal', (data_source, ground_truth)\n"
      "    assert extra_info['prompt'] == 'otter teal ; ? otter', extra_info\n"
      "    return len(solution_str.split()) + (10 if extra_info['ended'] else 0) + 100 * extra_info['tokens']\n");
  EXPECT_EQ(score(*r, "teal plum <end>"), 2 + 10 + 300);
  EXPECT_EQ(score(*r, "teal"), 1 + 100);
}

TEST_F(PythonReward, MayReturnADictAndMayPrint) {
  const auto r = reward("    print('chatter')\n    return {'score': float(solution_str == ground_truth), 'acc': 1}\n");
  EXPECT_EQ(score(*r, "teal <end>"), 1);
  EXPECT_EQ(score(*r, "plum <end>"), 0);
}

TEST_F(PythonReward, AFailureIsAnErrorWithPythonsMessageAndLine) {
  const auto r = reward("    if 'plum' in solution_str:\n        raise ValueError('no plums')\n    return 1\n");
  EXPECT_EQ(score(*r, "teal <end>"), 1);
  EXPECT_EQ(message(*r, "plum <end>"), "ValueError: no plums (line 3)");
  EXPECT_EQ(score(*r, "teal <end>"), 1);  // the process is still there
}

TEST_F(PythonReward, WhatIsNoNumberIsAnError) {
  EXPECT_NE(message(*reward("    return 'much'\n")).find("ValueError"), std::string::npos);
  EXPECT_NE(message(*reward("    return float('nan')\n")).find("no finite number"), std::string::npos);
  EXPECT_NE(message(*reward("    return {'points': 1}\n")).find("KeyError"), std::string::npos);
}

TEST_F(PythonReward, AFileThatCannotBeImportedIsAnError) {
  std::ofstream(file_) << "import no_such_module_anywhere\n";
  EXPECT_NE(message(*make_reward(file_.string(), "retrieval")).find("no_such_module_anywhere' (line 1)"),
            std::string::npos);
  std::ofstream(file_) << "def compute_score(:\n";
  EXPECT_NE(message(*make_reward(file_.string(), "retrieval")).find("SyntaxError"), std::string::npos);
  std::ofstream(file_) << "answer = 1\n";
  EXPECT_NE(message(*make_reward(file_.string(), "retrieval")).find("compute_score"), std::string::npos);
}

TEST_F(PythonReward, AProcessThatEndsIsAnErrorAndNoHang) {
  const auto r = reward("    import os\n    os._exit(9)\n");
  EXPECT_EQ(message(*r), "its end with status 9");
}

TEST_F(PythonReward, AProcessThatStopsListeningIsAnErrorAndNoHang) {
  const auto r = reward("    import os, time\n    os.closerange(0, 100)\n    time.sleep(600)\n");
  EXPECT_EQ(message(*r), "its end");
}

TEST(PythonProcess, ThatTakesTooLongIsAnErrorWhetherItReadsOrNot) {
  for (const std::string& line : {std::string("short\n"), std::string(10'000'000, 'x') + '\n'}) {
    PythonProcess process("import time; time.sleep(600)", "", "reward.py", 200);
    try {
      (void)process.ask(line);
      FAIL();
    } catch (const InputError& error) {
      EXPECT_EQ(error.text().got, "none within 0.2 seconds");
    }
  }
}

TEST_F(PythonReward, RunsInThePythonThatTheEnvironmentNames) {
  const char* const before = std::getenv("ESPALIER_PYTHON");
  const std::string kept = before ? before : "";
  ::setenv("ESPALIER_PYTHON", "/no/such/python3", 1);
  try {
    (void)reward("    return 1\n");
    ADD_FAILURE() << "a reward without a Python";
  } catch (const InputError& error) {
    EXPECT_EQ(error.text().expected, "a Python to run it (/no/such/python3)");
    EXPECT_NE(error.text().remedy.find("ESPALIER_PYTHON"), std::string::npos);
  }
  before ? ::setenv("ESPALIER_PYTHON", kept.c_str(), 1) : ::unsetenv("ESPALIER_PYTHON");
}

TEST_F(PythonReward, AFileThatIsNotThereIsAnError) {
  EXPECT_THROW((void)make_reward("/no/such/reward.py", "retrieval"), InputError);
}

}  // namespace
}  // namespace espalier
