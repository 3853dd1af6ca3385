#include "espalier/tasks/task.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cctype>
#include <map>
#include <set>
#include <sstream>
#include <tuple>

#include "espalier/base/error.h"

namespace espalier {
namespace {

const Vocabulary& words() { return Vocabulary::built_in(); }

std::vector<std::string> split(const std::string& text) {
  std::vector<std::string> out;
  std::istringstream in(text);
  for (std::string word; in >> word;) out.push_back(word);
  return out;
}

// The answer worked out from the text alone, as a reader would.
std::string answer_by_reading(const std::string& task, const std::vector<std::string>& prompt) {
  const auto question = static_cast<std::size_t>(std::ranges::find(prompt, "?") - prompt.begin());
  if (task == "retrieval") {
    const std::string& name = prompt.at(question + 1);
    for (std::size_t i = 0; i < question; ++i)
      if (prompt[i] == name) return prompt[i + 1];
  }
  if (task == "recite") {
    std::string answer;
    const auto at = static_cast<std::size_t>(std::ranges::find(prompt, prompt.at(question + 1)) - prompt.begin());
    for (std::size_t i = at + 1; prompt[i] != ";"; ++i) answer += (answer.empty() ? "" : " ") + prompt[i];
    return answer;
  }
  if (task == "arithmetic") {
    std::map<std::string, int> value;
    for (std::size_t i = 0; i < question; ++i) {
      if (prompt[i] != "=" || !std::isalpha(prompt[i - 1][0])) continue;
      if (prompt[i + 2] == ";")
        value[prompt[i - 1]] = std::stoi(prompt[i + 1]);
      else if (prompt[i + 2] == "+")
        value[prompt[i - 1]] = (value.at(prompt[i + 1]) + std::stoi(prompt[i + 3])) % 10;
    }
    return std::to_string((value.at(prompt[question + 1]) + std::stoi(prompt[question + 3])) % 10);
  }
  const std::string& name = prompt.at(question + 2);
  const std::string& with = prompt.at(question + 4);
  const std::string& old = prompt.at(question + 6);
  for (std::size_t i = 0; i < question; ++i) {
    if (prompt[i] != name || prompt[i + 1] != ":") continue;
    std::string answer;
    for (std::size_t j = i + 2; prompt[j] != ";"; ++j)
      answer += (answer.empty() ? "" : " ") + (prompt[j] == old ? with : prompt[j]);
    return answer;
  }
  return "no answer found";
}

class EveryTask : public testing::TestWithParam<std::tuple<std::string, std::int64_t>> {
 protected:
  Task task() const { return {Choice<TaskKind>(std::get<0>(GetParam())), std::get<1>(GetParam())}; }
};

TEST_P(EveryTask, TheAnswerFollowsFromTheText) {
  for (std::uint64_t i = 0; i < 40; ++i)
    for (const Problem& p : task().problems(Split::train, Random(7).fork(i), 4))
      EXPECT_EQ(words().text(p.answer_ids), answer_by_reading(name_of(task().kind), split(words().text(p.prompt_ids))))
          << "problem " << i << ": " << words().text(p.prompt_ids);
}

TEST_P(EveryTask, PromptsHaveTheLengthAskedForAndAnswersAreNoLongerThanPromised) {
  for (std::uint64_t i = 0; i < 40; ++i)
    for (const Problem& p : task().problems(Split::held_out, Random(8).fork(i), 2)) {
      EXPECT_EQ(static_cast<std::int64_t>(p.prompt_ids.size()), task().prompt_length);
      EXPECT_LE(static_cast<std::int64_t>(p.answer_ids.size()) + 1, task().longest_answer());
    }
}

TEST_P(EveryTask, TheSameSeedMakesTheSameProblemsAndAnotherOthers) {
  const auto prompts = [&](std::uint64_t seed) {
    std::vector<TokenIds> out;
    for (const Problem& p : task().problems(Split::train, Random(seed), 3)) out.push_back(p.prompt_ids);
    return out;
  };
  EXPECT_EQ(prompts(1), prompts(1));
  EXPECT_NE(prompts(1), prompts(2));
}

TEST_P(EveryTask, TrainingAndHeldOutProblemsAreDisjoint) {
  std::set<TokenIds> train;
  for (std::uint64_t i = 0; i < 300; ++i)
    for (const Problem& p : task().problems(Split::train, Random(3).fork(i), 8)) train.insert(p.prompt_ids);
  // The same documents are asked about, so without the split questions would coincide.
  for (std::uint64_t i = 0; i < 300; ++i)
    for (const Problem& p : task().problems(Split::held_out, Random(3).fork(i), 8))
      EXPECT_FALSE(train.contains(p.prompt_ids)) << words().text(p.prompt_ids);
}

INSTANTIATE_TEST_SUITE_P(Tasks, EveryTask,
                         testing::Values(std::tuple("retrieval", 8), std::tuple("retrieval", 64),
                                         std::tuple("retrieval", 1024), std::tuple("arithmetic", 17),
                                         std::tuple("arithmetic", 256), std::tuple("arithmetic", 2048),
                                         std::tuple("copy", 64), std::tuple("copy", 512), std::tuple("recite", 20),
                                         std::tuple("recite", 512)),
                         [](const auto& info) {
                           return std::get<0>(info.param) + "_" + std::to_string(std::get<1>(info.param));
                         });

TEST(Task, QuestionsAboutOneDocumentShareEverythingBeforeTheQuestion) {
  const auto problems = Task{TaskKind::retrieval, 256}.problems(Split::train, Random(5), 16);
  ASSERT_EQ(problems.size(), 16u);
  for (const Problem& p : problems)
    EXPECT_TRUE(std::equal(p.prompt_ids.begin(), p.prompt_ids.end() - 1, problems.front().prompt_ids.begin()));
}

TEST(Task, TooShortAPromptIsRefusedWithTheShortestThereIs) {
  for (const char* name : {"retrieval", "recite", "arithmetic", "copy"}) {
    const Task task{Choice<TaskKind>(name), 7};
    try {
      (void)task.problems(Split::train, Random(1), 1);
      FAIL() << name;
    } catch (const OptionError& error) {
      EXPECT_NE(error.text().expected.find(std::to_string(task.shortest_prompt())), std::string::npos);
    }
    EXPECT_FALSE((Task{task.kind, task.shortest_prompt()}.problems(Split::train, Random(1), 1).empty()));
  }
}

TEST(Vocabulary, EveryTokenHasTextAndTextGivesTheTokensBack) {
  TokenIds all;
  for (std::int32_t id = 0; id < words().size(); ++id) all.push_back(id);
  all.push_back(812);  // of a larger model's vocabulary
  EXPECT_EQ(words().ids(words().text(all), "here"), all);
  EXPECT_EQ(words().text({}), "");
  EXPECT_EQ(words().ids("", "here"), TokenIds{});
  EXPECT_EQ(words().text(TokenIds{words().end()}), "<end>");
}

TEST(Vocabulary, AWordThatIsNoneIsNamed) {
  try {
    (void)words().ids("otter unicorn", "line 3");
    FAIL();
  } catch (const InputError& error) {
    EXPECT_EQ(error.text().where, "line 3");
    EXPECT_NE(error.text().got.find("unicorn"), std::string::npos);
  }
}

TEST(AnswerScore, IsTheShareOfRightPlaces) {
  const auto score = [](const std::string& response, const std::string& answer) {
    return answer_score(words().ids(response, ""), words().ids(answer, ""));
  };
  EXPECT_EQ(score("teal <end>", "teal"), 1);
  EXPECT_EQ(score("plum <end>", "teal"), 0);
  EXPECT_EQ(score("teal", "teal"), 0.5);                          // not ended: one place too many
  EXPECT_EQ(score("<end>", "teal"), 0);                           // nothing said
  EXPECT_EQ(score("", "teal"), 0);                                // not even that
  EXPECT_EQ(score("teal plum <end>", "teal"), 0.5);               // too long
  EXPECT_EQ(score("rain fell <end>", "rain fell old men"), 0.5);  // too short
  EXPECT_EQ(score("rain rain old men <end>", "rain fell old men"), 0.75);
}

}  // namespace
}  // namespace espalier
