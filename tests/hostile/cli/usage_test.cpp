// Wrong usage, help, and what --json promises.
#include <gtest/gtest.h>

#include <algorithm>
#include <fstream>
#include <random>

#include "espalier/base/json.h"
#include "espalier/options/options.h"
#include "espalier/settings/option_help.h"
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
      {{"grpo", "--out", "a", "--task", "chess"}, 2, "one of retrieval, recite, arithmetic, copy"},
      {{"bench", "--n", "2.5"}, 2, "whole numbers"},
      {{"bench", "--n", "8,2.5"}, 2, "whole numbers"},
      {{"bench", "--splits", ""}, 2, "--splits"},
      {{"bench", "--splits", "10"}, 2, "--splits"},
      {{"generate", "--model", "a", "--out", "b"}, 2, "--prompts"},
      {{"generate", "--model", "nothing-here", "--prompts", "b", "--out", "c"}, 3, "nothing-here"},
      {{"report"}, 2, "RUN_DIR"},
      {{"merge", "--model", "a", "--out", "b"}, 2, "ADAPTER"},
      {{"merge", "nothing-here", "--model", "nothing-there", "--out", "b"}, 3, "nothing-there"},
      {{"report", "nothing-here"}, 3, "nothing-here"},
      {{"replay", "nothing-here"}, 3, "nothing-here"},
      {{""}, 2, "one of inspect"},
      {{"--jason", "inspect"}, 2, "the verb first"},
      {{"train", "--shedule", "auto"}, 2, "did you mean --schedule?"},
      {{"train", "--clip_ratio_hihg", "1"}, 2, "did you mean --clip-ratio-high?"},
      {{"train", "--shedule=auto"}, 2, "did you mean --schedule?"},
      {{"inspect", "--lr", "1", "x"}, 2, "an option of train, verify, replay, grpo"},
      {{"train", "--num-generations", "8"}, 2, "did you mean --n? It is an option of plan, generate, grpo, bench"},
      {{"train", "--help", "zebra"}, 2, "a word that occurs in the options of train"},
      {{"--help", "trian"}, 2, "did you mean train?"},
      {{"train", "--policy-loss", "ppo"}, 2, "vanilla"},
      {{"train", "--dtype", "fp16"}, 2, "bfloat16"},
      {{"train", "--memory-budget", "8"}, 2, "8GiB"},
      {{"inspect", "x", "--dry-run"}, 2, "leave it out"},
      {{"completion", "tcsh"}, 2, "bash, zsh or fish"},
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
      {{"train", "--top-entropy-quantile", "0.2"}, 4, "top_entropy_quantile"},
      {{"train", "--rollouts", "b", "--out", "c"}, 2, "--model"},
      {{"train", "--model", "a", "--rollouts", "b"}, 2, "--out"},
      {{"train", "--model", "a", "--rollouts", "b", "--out", "c", "d"}, 2, "options only"},
      {{"train", "--model", "a", "--rollouts", "b", "--out", "c", "--tp", "2"}, 2, "torchrun --nproc-per-node 2"},
      {{"grpo", "--out", "c", "--shard", "full"}, 4, "--shard"},
      {{"verify", "--model", "a", "--rollouts", "b", "--dp", "3"}, 2, "torchrun --nproc-per-node 3"},
      {{"inspect"}, 2, "ROLLOUTS"},
      {{"convert", "a"}, 2, "IN OUT"},
      {{"convert", "a", "b.jsonl", "c"}, 2, "IN OUT"},
      {{"convert", "a", "b.pt"}, 2, ".jsonl"},
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

TEST(WrongUsage, ADeviceThatIsAbsentIsNamed) {
  if (std::filesystem::exists("/dev/nvidiactl"))
    GTEST_SKIP() << "this machine has a GPU's driver: the device may be there";
  const Folder folder;
  const Outcome outcome = run(folder.path(), {"inspect", "--device", "cuda", "x"});
  EXPECT_EQ(outcome.code, 8) << outcome.err;
  EXPECT_NE(outcome.err.find("CUDA"), outcome.err.npos) << outcome.err;
  EXPECT_EQ(outcome.out, "");
}

// The device of tests is taken and told to nobody.
TEST(WrongUsage, TheDeviceOfTestsIsInNoHelp) {
  const Folder folder;
  EXPECT_EQ(run(folder.path(), {"train", "--help", "all"}).out.find("emulate"), std::string::npos);
}

TEST(WrongUsage, GivesOneObjectUnderJson) {
  const Folder folder;
  for (const Wrong& wrong : wrong_usage()) {
    Words words = wrong.words;
    words.insert(words.begin() + (words.empty() ? 0 : 1), "--json");  // behind the verb
    const Outcome outcome = run(folder.path(), words);
    const Json json = object_of(outcome);
    const std::string says = wrong.words.empty() ? "the verb first" : wrong.says;  // --json alone is not nothing
    EXPECT_EQ(outcome.code, wrong.code) << joined(words);
    ASSERT_TRUE(json.contains("error")) << joined(words) << outcome.out;
    EXPECT_NE(outcome.err.find(says), outcome.err.npos) << joined(words) << outcome.err;  // for who reads a log
    EXPECT_EQ(json["exit_code"], outcome.code);
    for (const char* part : {"kind", "where", "expected", "got", "remedy"})
      EXPECT_TRUE(json["error"].contains(part)) << part << " of " << joined(words);
  }
}

// Most of these tests call the program's function in a copy of their process: the built file says the same.
TEST(BuiltFile, SaysWhatTheFunctionSays) {
  const Folder folder;
  for (const Words& words : {Words{}, Words{"--version"}, Words{"train", "--help"}, Words{"train", "--lr", "x"}}) {
    const Outcome file = Started(folder.path(), words).wait(), function = run(folder.path(), words);
    EXPECT_EQ(file.code, function.code) << joined(words);
    EXPECT_EQ(file.out, function.out) << joined(words);
    EXPECT_EQ(file.err, function.err) << joined(words);
  }
}

TEST(Help, ShowsEveryOptionOfEveryVerb) {
  const Folder folder;
  for (const auto& [letter, name] : verb_names()) {
    for (const Words& words : {Words{name, "--help-all"}, Words{"help", name, "--help-all"}}) {
      const Outcome outcome = run(folder.path(), words);
      EXPECT_EQ(outcome.code, 0);
      EXPECT_EQ(outcome.err, "");
      for (const OptionRow& row : option_rows())
        EXPECT_EQ(outcome.out.find(std::string("\n  --") + row.name + ' ') != outcome.out.npos, row.taken_by(letter))
            << name << " --" << row.name;
    }
  }
}

TEST(Help, IsShortUnlessAllIsAskedFor) {
  const Folder folder;
  for (const Words& words :
       {Words{"train", "--help"}, Words{"help", "grpo"}, Words{"verify", "-h"}, Words{"train", "--model", "--help"}}) {
    const Outcome outcome = run(folder.path(), words);
    EXPECT_EQ(outcome.code, 0) << outcome.err;
    EXPECT_LE(std::count(outcome.out.begin(), outcome.out.end(), '\n'), 32) << outcome.out;
    EXPECT_NE(outcome.out.find("--help-all"), outcome.out.npos);
  }
}

TEST(Help, SearchesForAWord) {
  const Folder folder;
  for (const Words& words : {Words{"train", "--help", "learning-rate"}, Words{"help", "train", "learning rate"},
                             Words{"--help", "learning-rate"}, Words{"train", "--help-all", "learning_rate"}}) {
    const Outcome outcome = run(folder.path(), words);
    EXPECT_EQ(outcome.code, 0) << joined(words) << outcome.err;
    EXPECT_NE(outcome.out.find("--critic-lr"), outcome.out.npos) << joined(words);
    EXPECT_EQ(outcome.out.find("--schedule"), outcome.out.npos) << joined(words);
  }
}

TEST(PrintConfig, GivesAFileThatConfigReads) {
  const Folder folder;
  const Words given = {"train", "--lr", "0.25", "--beta", "0.5", "--dtype", "bf16", "--betas", "0.8,0.9"};
  Words words = given;
  words.push_back("--print-config");
  const Outcome printed = run(folder.path(), words);
  EXPECT_EQ(printed.code, 0) << printed.err;
  std::ofstream(folder.path() / "run.toml") << printed.out;
  const Outcome again = run(folder.path(), {"train", "--config", "run.toml", "--print-config"});
  EXPECT_EQ(again.out, printed.out);
  for (const char* line : {"lr = 0.25\n", "kl-loss-coef = 0.5\n", "dtype = \"bfloat16\"\n", "betas = [0.8, 0.9]\n"})
    EXPECT_NE(again.out.find(line), again.out.npos) << again.out;
}

TEST(Completion, NamesEveryVerbAndOption) {
  const Folder folder;
  for (const char* shell : {"bash", "zsh", "fish"}) {
    const Outcome outcome = run(folder.path(), {"completion", shell});
    EXPECT_EQ(outcome.code, 0);
    for (const auto& [letter, name] : verb_names()) EXPECT_NE(outcome.out.find(name), outcome.out.npos) << shell;
    for (const OptionRow& row : option_rows()) EXPECT_NE(outcome.out.find(row.name), outcome.out.npos) << shell;
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
  EXPECT_EQ(run(folder.path(), {"-V"}).out, run(folder.path(), {"--version"}).out);
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
