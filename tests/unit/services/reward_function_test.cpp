// Reward functions in their process: what they are told, what they may return, and every way in which they fail.
#include "espalier/services/reward_function.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>

#include "espalier/base/error.h"
#include "espalier/services/rollout_text.h"

namespace espalier {
namespace {

class RewardFile : public testing::Test {
 protected:
  RewardFile() : file_(std::filesystem::temp_directory_path() / ("reward_" + std::to_string(::getpid()) + ".py")) {}
  ~RewardFile() override { std::filesystem::remove(file_); }

  std::string path() const { return file_.string(); }
  void write(const std::string& source) const { std::ofstream(file_) << source; }
  std::unique_ptr<RewardFunction> reward(const std::string& body, double timeout = 60) {
    write("def compute_score(data_source, solution_str, ground_truth, extra_info):\n" + body);
    return std::make_unique<RewardFunction>(path(), timeout);
  }
  static Rollout answered(const std::string& response, const std::string& carried = R"({"data_source": "d"})") {
    Rollout rollout;
    rollout.prompt_ids = {1, 2};
    rollout.response_ids = {3, 4, 5};
    rollout.carried = carried;
    rollout.where = "prompts.jsonl:7";
    carry_text(rollout.carried, "response", response);
    return rollout;
  }
  static std::vector<Score> scores(RewardFunction& reward, const std::vector<std::string>& responses) {
    std::vector<Rollout> rollouts;
    for (const std::string& response : responses) rollouts.push_back(answered(response));
    NoProgress silent;
    return reward.of(rollouts, silent);
  }
  static double score(RewardFunction& reward, const std::string& response) {
    return scores(reward, {response}).front().score.value();
  }
  template <class Work>
  static ErrorText error_of(Work&& work) {
    try {
      work();
    } catch (const InputError& error) {
      return error.text();
    }
    ADD_FAILURE() << "no error";
    return {};
  }
  ErrorText error_of(RewardFunction& reward, const std::string& response = "teal") {
    return error_of([&] { (void)score(reward, response); });
  }

  std::filesystem::path file_;
};

TEST_F(RewardFile, GetsTheTextsAndTheirContext) {
  const auto r = reward(
      "    assert (data_source, solution_str, ground_truth) == ('d', 'teal', {'a': [1]}), ground_truth\n"
      "    assert extra_info == {'index': 3, 'ended': 'mine', 'prompt': 'Which?', 'tokens': 3}, extra_info\n"
      "    return 2\n");
  NoProgress silent;
  const std::vector<Rollout> asked = {
      answered("teal", R"({"data_source": "d", "reward_model": {"ground_truth": {"a": [1]}}, "prompt": "Which?",)"
                       R"( "extra_info": {"index": 3, "ended": "mine"}, "finish_reason": "stop"})")};
  EXPECT_EQ(r->of(asked, silent).front().score, 2);
  const auto bare = reward(
      "    assert (data_source, ground_truth, extra_info['prompt'], extra_info['ended']) == (None, None, None, False)\n"
      "    return 3\n");
  EXPECT_EQ(bare->of(std::vector<Rollout>{answered("", "")}, silent).front().score, 3);
}

TEST_F(RewardFile, MayReturnADictAndMayPrintAndFork) {
  const auto r = reward(
      "    import os\n"
      "    print('chatter', '{\"score\": 9}', flush=True)\n"
      "    os.write(1, b'{\"score\": 9}\\n')\n"
      "    if solution_str == 'fork' and os.fork() == 0:\n"
      "        return 100\n"
      "    return {'score': len(solution_str), 'acc': solution_str == 'teal', 'note': 'x', 'bad': float('nan')}\n");
  const std::vector<Score> found = scores(*r, {"teal", "fork", "plum", "a\nb \xc3\xa9 \xf0\x9f\x99\x82"});
  ASSERT_EQ(found.size(), 4u);
  EXPECT_EQ(found[0].score, 4);
  EXPECT_EQ(found[0].accuracy, 1.0);
  EXPECT_EQ(Json::parse(found[0].extra), (Json{{"acc", true}, {"note", "x"}, {"bad", "nan"}}));
  EXPECT_EQ(found[1].score, 4);
  EXPECT_EQ(found[2].accuracy, 0.0);
  EXPECT_EQ(found[3].score, 7);
}

TEST_F(RewardFile, MayBeABatchFunctionOfVerlOrTrl) {
  write(
      "def compute_score(data_sources, solution_strs, ground_truths, extra_infos):\n"
      "    return [len(solution_strs) + len(s) for s in solution_strs]\n");
  RewardFunction verl(path(), 60);
  EXPECT_EQ(scores(verl, {"a", "bcd"})[1].score, 5);
  write(
      "async def compute_score(prompts, completions, completion_ids, data_source, **kwargs):\n"
      "    assert data_source == ['d', 'd'] and kwargs.keys() == {'ground_truth', 'extra_info'}, kwargs\n"
      "    return [len(c) + 10 * len(i) for c, i in zip(completions, completion_ids)]\n");
  RewardFunction trl(path(), 60);
  EXPECT_EQ(scores(trl, {"a", "bcd"})[1].score, 33);
  write("def compute_score(prompts, completions):\n    return [1]\n");
  RewardFunction short_list(path(), 60);
  const ErrorText error = error_of([&] { (void)scores(short_list, {"a", "b"}); });
  EXPECT_EQ(error.got, "a list of 1 scores for 2 responses");
}

TEST_F(RewardFile, AnExceptionIsToldWithItsLineAndTheResponse) {
  const auto r = reward("    if 'plum' in solution_str:\n        raise ValueError('no plums')\n    return 1\n");
  EXPECT_EQ(score(*r, "teal"), 1);
  const ErrorText error = error_of(*r, "plum");
  EXPECT_EQ(error.where, path() + ":3");
  EXPECT_EQ(error.got, "ValueError: no plums");
  EXPECT_EQ(error.remedy, "for a response to prompts.jsonl:7: 'plum'");
  EXPECT_EQ(score(*r, "teal"), 1);  // and it goes on
  EXPECT_EQ(error_of(*reward("    raise SystemExit(3)\n")).got, "SystemExit: 3");
}

TEST_F(RewardFile, WhatIsNoNumberIsToldApartFromAnException) {
  const std::pair<const char*, const char*> cases[] = {
      {"    return 'much'\n", "str: 'much'"},
      {"    return '1'\n", "str: '1'"},
      {"    return float('nan')\n", "nan, which is not a finite number"},
      {"    return {'points': 1}\n", "a dict without 'score': {'points': 1}"},
  };
  for (const auto& [body, got] : cases) {
    const ErrorText error = error_of(*reward(body));
    EXPECT_EQ(error.got, got);
    EXPECT_EQ(
        error.expected,
        "compute_score to return a number, a dict with a number under 'score', or None for a response that it does "
        "not judge");
  }
  EXPECT_FALSE(scores(*reward("    return None\n"), {"teal"}).front().score);  // not judged
}

TEST_F(RewardFile, AFileThatCannotServeIsAnErrorAtOnce) {
  const auto error = [&](const std::string& source) {
    write(source);
    return error_of([&] { RewardFunction(path(), 60); });
  };
  EXPECT_EQ(error("import no_such_module_anywhere\n").where, path() + ":1");
  EXPECT_EQ(error("import no_such_module_anywhere\n").got,
            "ModuleNotFoundError: No module named 'no_such_module_anywhere'");
  EXPECT_EQ(error("x = 1\ndef compute_score(:\n").where, path() + ":2");
  EXPECT_EQ(error("def compute_score(:\n").expected, "valid Python");
  EXPECT_EQ(error("answer = 1\ndef reward(): pass\n").got, "reward");
  EXPECT_EQ(error("answer = 1\n").got, "no function at all");
  EXPECT_EQ(error_of([&] { RewardFunction("/no/such/reward.py", 60); }).got, "no such file");
}

TEST_F(RewardFile, AProcessThatDiesIsStartedAgainOnceForAResponse) {
  const std::string mark = path() + ".died";
  std::filesystem::remove(mark);
  const auto once = reward("    import os\n    if solution_str == 'b' and not os.path.exists('" + mark +
                           "'):\n        open('" + mark + "', 'w').close()\n        os._exit(9)\n    return 1\n");
  EXPECT_EQ(scores(*once, {"a", "b", "c"}).size(), 3u);
  EXPECT_TRUE(std::filesystem::remove(mark));
  const auto always = reward("    import os\n    if solution_str == 'b':\n        os._exit(9)\n    return 1\n");
  const ErrorText error = error_of([&] { (void)scores(*always, {"a", "b"}); });
  EXPECT_EQ(error.got, "its end with status 9, twice");
  EXPECT_EQ(error.remedy, "for a response to prompts.jsonl:7: 'b'");
  EXPECT_EQ(score(*always, "a"), 1);
}

TEST_F(RewardFile, AProcessThatClosesEverythingIsAnErrorAndNoHang) {
  const auto r = reward("    import os, time\n    os.closerange(0, 100)\n    time.sleep(600)\n");
  EXPECT_EQ(error_of(*r).got, "its end, twice");
}

TEST_F(RewardFile, ATimeOutIsToldAsOne) {
  const auto r = reward("    import time\n    time.sleep(600 if solution_str == 'slow' else 0)\n    return 1\n", 0.5);
  const ErrorText error = error_of(*r, "slow");
  EXPECT_EQ(error.expected, "compute_score to return in time");
  EXPECT_EQ(error.got, "none within 0.5 seconds");
  EXPECT_NE(error.remedy.find("--reward-timeout"), std::string::npos);
  EXPECT_EQ(score(*r, "quick"), 1);  // by a new process
}

TEST_F(RewardFile, LongBatchesAndLongTextsPass) {
  const auto r = reward("    return len(solution_str)\n");
  const std::vector<Score> found = scores(*r, std::vector<std::string>(300, std::string(20'000, 'x')));
  ASSERT_EQ(found.size(), 300u);
  EXPECT_EQ(found.back().score, 20'000);
}

TEST_F(RewardFile, RunsInThePythonThatTheEnvironmentNames) {
  const char* const before = std::getenv("ESPALIER_PYTHON");
  const std::string kept = before ? before : "";
  ::setenv("ESPALIER_PYTHON", "/no/such/python3", 1);
  const ErrorText error = error_of([&] { (void)reward("    return 1\n"); });
  EXPECT_EQ(error.expected, "a Python to run it (/no/such/python3)");
  EXPECT_NE(error.remedy.find("ESPALIER_PYTHON"), std::string::npos);
  before ? ::setenv("ESPALIER_PYTHON", kept.c_str(), 1) : ::unsetenv("ESPALIER_PYTHON");
}

TEST(PythonProcess, ThatNeitherReadsNorAnswersIsTooLate) {
  for (const std::size_t characters : {5, 10'000'000}) {
    PythonProcess process({"-c", "import time; time.sleep(600)"}, "reward.py");
    EXPECT_THROW((process.send(std::string(characters, 'x') + '\n', 200), process.receive(200)), PythonLate);
  }
}

}  // namespace
}  // namespace espalier
