// Wrong usage, help, and what --json promises.
#include <gtest/gtest.h>

#include <algorithm>
#include <random>

#include "espalier/base/json.h"
#include "espalier/options/option_help.h"
#include "espalier/options/options.h"
#include "tests/hostile/cli/program_run.h"

namespace espalier::testing {
namespace {

using Words = std::vector<std::string>;

std::string joined(const Words& words) {
  std::string text;
  for (const std::string& word : words) text += word + ' ';
  return text;
}

// Parses standard output as exactly one JSON object with the members that every object has.
Json object_of(const Outcome& outcome) {
  const Json json = Json::parse(outcome.out, nullptr, false);
  EXPECT_TRUE(json.is_object()) << outcome.out;
  for (const char* name : {"espalier", "verb", "device", "dtype", "threads", "options", "seconds", "peak_bytes"})
    EXPECT_TRUE(json.is_object() && json.contains(name)) << name << " in " << outcome.out;
  return json;
}

struct Wrong {
  Words words;
  int code;
  std::string says;  // a piece of the message
};

const std::vector<Wrong>& wrong_usage() {
  static const std::vector<Wrong> cases = {
      {{}, 2, "expected a verb"},
      {{"inspct", "x"}, 2, "did you mean inspect?"},
      {{"grop", "x"}, 2, "did you mean grpo?"},
      {{"tune", "x"}, 2, "one of inspect"},
      {{"grpo", "--out", "a", "x"}, 2, "options only"},
      {{"grpo"}, 2, "--out"},
      {{"grpo", "--out", "a", "--n", "2.5"}, 2, "one whole number"},
      {{"grpo", "--out", "a", "--task", "chess"}, 2, "one of retrieval, arithmetic, copy"},
      {{"bench", "--n", "2.5"}, 2, "whole numbers"},
      {{"bench", "--n", "8,2.5"}, 2, "whole numbers"},
      {{"bench", "--splits", ""}, 2, "--splits"},
      {{"bench", "--splits", "10"}, 2, "--splits"},
      {{"generate", "--model", "a", "--out", "b"}, 2, "--prompts"},
      {{"generate", "--model", "nothing-here", "--prompts", "b", "--out", "c"}, 3, "nothing-here"},
      {{"report"}, 2, "RUN_DIR"},
      {{"report", "nothing-here"}, 3, "nothing-here"},
      {{"replay", "nothing-here"}, 3, "nothing-here"},
      {{""}, 2, "one of inspect"},
      {{"--jason", "inspect"}, 2, "the verb first"},
      {{"train", "--shedule", "auto"}, 2, "did you mean --schedule?"},
      {{"train", "--clip_ratio_hihg", "1"}, 2, "did you mean --clip-ratio-high?"},
      {{"train", "--shedule=auto"}, 2, "did you mean --schedule?"},
      {{"inspect", "--lr", "1", "x"}, 2, "train"},
      {{"train", "--lr", "abc"}, 2, "a number in [0, inf)"},
      {{"train", "--lr=-1"}, 2, "a number in [0, inf)"},
      {{"train", "--lr", "nan"}, 2, "a number in [0, inf)"},
      {{"train", "--lr="}, 2, "a number in [0, inf)"},
      {{"train", "--lr"}, 2, "a number in [0, inf)"},
      {{"train", "--model", "--lr", "1"}, 2, "a path"},
      {{"train", "--schedule", "quick"}, 2, "one of auto, dense, packed, phased"},
      {{"train", "--memory-budget", "lots"}, 2, "memory-budget"},
      {{"train", "--decay-matrices-only=perhaps"}, 2, ""},
      {{"train", "--policy-loss", "sapo", "--loss-agg-mode", "token-mean"}, 2, "seq-mean-token-mean"},
      {{"train", "--loss-type", "luspo"}, 4, "luspo"},
      {{"train", "--rollouts", "b", "--out", "c"}, 2, "--model"},
      {{"train", "--model", "a", "--rollouts", "b"}, 2, "--out"},
      {{"train", "--model", "a", "--rollouts", "b", "--out", "c", "d"}, 2, "options only"},
      {{"train", "--model", "a", "--rollouts", "b", "--out", "c", "--tp", "2"}, 4, "--tp"},
      {{"verify", "--model", "a", "--rollouts", "b", "--dp", "3"}, 4, "--dp"},
      {{"inspect"}, 2, "ROLLOUTS"},
      {{"convert", "a"}, 2, "IN OUT"},
      {{"convert", "a", "b.jsonl", "c"}, 2, "IN OUT"},
      {{"convert", "a", "b.pt"}, 2, ".jsonl"},
      {{"inspect", "--device", "cuda", "x"}, 8, "CUDA"},
      {{"inspect", "--device", "tpu", "x"}, 2, "one of cpu, cuda"},
      {{"inspect", "nothing-here"}, 3, "nothing-here"},
      {{"inspect", "--", "--nothing-here"}, 3, "--nothing-here"},
      {{"inspect", "x", "--config", "nothing-here.toml"}, 3, "nothing-here.toml"},
      {{"plan", "--model", "nothing-here", "--rollouts", "b"}, 3, "nothing-here"},
  };
  return cases;
}

TEST(WrongUsage, EndsWithItsCodeAndAMessageOnStandardError) {
  const Folder folder;
  for (const Wrong& wrong : wrong_usage()) {
    const Outcome outcome = run(folder.path(), wrong.words);
    EXPECT_EQ(outcome.code, wrong.code) << joined(wrong.words) << outcome.err;
    EXPECT_NE(outcome.err.find(wrong.says), outcome.err.npos) << joined(wrong.words) << outcome.err;
    EXPECT_EQ(outcome.out, "") << joined(wrong.words);
    EXPECT_LE(std::count(outcome.err.begin(), outcome.err.end(), '\n'), 4) << outcome.err;
  }
}

TEST(WrongUsage, GivesOneObjectUnderJson) {
  const Folder folder;
  for (const Wrong& wrong : wrong_usage()) {
    Words words = wrong.words;
    words.insert(words.begin() + (words.empty() ? 0 : 1), "--json");  // behind the verb
    const Outcome outcome = run(folder.path(), words);
    const Json json = object_of(outcome);
    EXPECT_EQ(outcome.code, words == Words{"--json"} ? 2 : wrong.code) << joined(words);
    ASSERT_TRUE(json.contains("error")) << joined(words) << outcome.out;
    EXPECT_EQ(json["exit_code"], outcome.code);
    for (const char* part : {"kind", "where", "expected", "got", "remedy"})
      EXPECT_TRUE(json["error"].contains(part)) << part << " of " << joined(words);
  }
}

TEST(Help, ShowsEveryOptionOfEveryVerb) {
  const Folder folder;
  for (const auto& [letter, name] : verb_names()) {
    for (const Words& words : {Words{name, "--help"}, Words{"help", name}, Words{name, "-h"}}) {
      const Outcome outcome = run(folder.path(), words);
      EXPECT_EQ(outcome.code, 0);
      EXPECT_EQ(outcome.err, "");
      for (const OptionRow& row : option_rows())
        EXPECT_EQ(outcome.out.find(std::string("\n  --") + row.name + ' ') != outcome.out.npos, row.taken_by(letter))
            << name << " --" << row.name;
    }
  }
}

TEST(Help, OfTheProgramNamesEveryVerb) {
  const Folder folder;
  const Outcome outcome = run(folder.path(), {"--help"});
  EXPECT_EQ(outcome.code, 0);
  for (const auto& [letter, name] : verb_names())
    EXPECT_NE(outcome.out.find(std::string("\n  ") + name + ' '), outcome.out.npos);
}

TEST(Version, IsOneLine) {
  const Folder folder;
  const Outcome outcome = run(folder.path(), {"--version"});
  EXPECT_EQ(outcome.code, 0);
  EXPECT_EQ(outcome.out.rfind("espalier ", 0), 0u);
  EXPECT_EQ(std::count(outcome.out.begin(), outcome.out.end(), '\n'), 1);
}

// Words in random order: whatever is typed ends with a documented code, and under --json with one object.
TEST(RandomWords, NeverEndInADefect) {
  const Folder folder;
  folder.put("r.jsonl", "{\"prompt_ids\":[1,2],\"response_ids\":[3]}\n");
  folder.put("c.toml", "lr = 1\n[inspect]\nseed = 3\n");
  // clang-format off
  const Words pool = {
      "--json", "--quiet", "--lr", "--lr=1", "1", "-1", "--betas", "0.9,0.95", "[0.9,0.95]", "--", "-", "---", "--=",
      "-x", "", "r.jsonl", "a\nb", "--model", "--rollouts", "--out", "--config", "c.toml", "--explain", "--explain=false",
      "--tp", "2", "--seed", "--threads", "{}", "[]", "--beta", "--loss_type", "dapo", "\xff\xfe", "--memory_budget",
      "8GiB", "--n", "%s%n", "inspect", "nan"};
  // clang-format on
  const unsigned seed = 20240607;
  std::mt19937 random(seed);
  for (int i = 0; i < 60; ++i) {
    Words words = {verb_names()[random() % verb_names().size()].name};
    for (unsigned n = random() % 7; n > 0; --n) words.push_back(pool[random() % pool.size()]);
    if (words[0] == std::string("bench")) words.push_back("--model=nothing-here");  // else a benchmark would run
    const Outcome outcome = run(folder.path(), words);
    const std::string told = "seed " + std::to_string(seed) + ", case " + std::to_string(i) + ": " + joined(words);
    EXPECT_TRUE(outcome.code == 0 || (outcome.code >= 2 && outcome.code <= 8)) << told << outcome.code << outcome.err;
    EXPECT_TRUE(outcome.code == 0 || outcome.out.empty() || Json::accept(outcome.out)) << told;
  }
}

}  // namespace
}  // namespace espalier::testing
