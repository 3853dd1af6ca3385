#include "espalier/settings/option_help.h"

#include <algorithm>
#include <cstring>
#include <fstream>
#include <sstream>

#include "espalier/options/options.h"
#include "espalier/settings/trl_names.h"
#include "tests/support/source_dir.h"
#include "tests/unit/options/thrown_error.h"

namespace espalier {
namespace {

TEST(OptionHelp, NamesEveryOptionOfTheVerbAndNoOther) {
  for (const auto& [verb, name] : verb_names()) {
    const std::string help = option_help(verb);
    for (const OptionRow& row : option_rows())
      EXPECT_EQ(help.find(std::string("\n  --") + row.name + ' ') != help.npos, row.taken_by(verb))
          << verb << ' ' << row.name;
  }
}

TEST(ShortHelp, IsAScreenOfTheVerbsOwnOptions) {
  for (const auto& [verb, name] : verb_names()) {
    const std::string help = short_option_help(verb);
    EXPECT_LE(std::count(help.begin(), help.end(), '\n'), 23) << name << '\n' << help;  // with head and foot 30
    EXPECT_LE(help.size(), option_help(verb).size()) << name;
    for (const OptionRow& row : option_rows()) {
      const std::string entry = std::string("--") + row.name + ' ';
      const bool shown =
          ('\n' + help).find("\n  " + entry) != help.npos || help.find(", " + entry) != help.npos;  // degrees: one line
      EXPECT_EQ(shown, row.in_short_help_of(verb)) << name << ' ' << row.name;
      EXPECT_FALSE(row.in_short_help_of(verb) && std::strcmp(section_of(row), "TRL's formulas") == 0) << row.name;
    }
  }
  for (const char* name : {"--model", "--rollouts", "--out", "--lr", "--policy-loss", "--mini-batch-size"})
    EXPECT_NE(short_option_help('t').find(std::string("  ") + name + ' '), std::string::npos) << name;
}

TEST(OptionHelp, ShowsAVerbItsOwnHalfOfASharedMeaning) {
  const OptionRow &out = *find_option("out"), &model = *find_option("model");
  EXPECT_EQ(meaning_for(out, 't'), "what is written: a model directory");
  EXPECT_EQ(meaning_for(out, 'o'), "what is written: a page");
  EXPECT_EQ(meaning_for(model, 't'), "Hugging Face model directory");
  EXPECT_EQ(meaning_for(model, 'b'), "Hugging Face model directory; config.json is enough");
  EXPECT_EQ(meaning_for_all(model),
            "Hugging Face model directory; config.json is enough (plan, bench); or NAME=DIR with the name that clients "
            "give, once for each model (serve)");
  EXPECT_EQ(meaning_for_all(out),
            "what is written: a model directory (train, merge), records (score, generate), a run folder (grpo), a page "
            "(report), "
            "the picture of --frontier, as SVG (plan)");
  for (const OptionRow& row : option_rows())
    for (const auto& [verb, name] : verb_names())
      EXPECT_EQ(meaning_for(row, verb).find_first_of("{|}"), std::string::npos) << row.name << ' ' << name;
}

TEST(OptionSearch, FindsNamesMeaningsChoicesAndTheWordsOfOthers) {
  const auto finds = [](char verb, const char* word, const char* option) {
    return option_search(verb, word).find(std::string("  --") + option + ' ') != std::string::npos;
  };
  EXPECT_TRUE(finds('t', "lr", "lr"));
  EXPECT_TRUE(finds('t', "learning-rate", "lr"));
  EXPECT_TRUE(finds('t', "--Learning_Rate", "critic-lr"));
  EXPECT_TRUE(finds('t', "gspo", "policy-loss"));
  EXPECT_TRUE(finds('t', "epsilon", "clip-ratio-low"));
  EXPECT_TRUE(finds('t', "batch_size", "mini-batch-size"));
  EXPECT_FALSE(finds('t', "gspo", "lr"));
  EXPECT_FALSE(finds('t', "prompt-length", "prompt-length"));
  EXPECT_TRUE(finds('\0', "prompt-length", "prompt-length"));
  EXPECT_NE(option_search('\0', "prompt-length").find("(grpo)"), std::string::npos);
  EXPECT_EQ(option_search('t', "zebra"), "");
}

TEST(OptionHelp, ShowsDefaultsUnitsAndChoices) {
  const std::string help = option_help('t', 1000);
  EXPECT_NE(help.find("[1e-6]"), help.npos);
  EXPECT_NE(help.find("[0 rows]"), help.npos);
  EXPECT_NE(help.find("auto | dense | packed | phased"), help.npos);
}

TEST(OptionHelp, KeepsItsWidth) {
  for (const std::size_t width : {80u, 100u}) {
    std::istringstream lines(option_help('t', width));
    for (std::string line; std::getline(lines, line);)
      EXPECT_TRUE(line.size() <= width || line.find_last_of(' ') < 30) << line;  // a single long word may stick out
  }
}

TEST(OptionDocs, NamesEveryOption) {
  const std::string docs = option_docs();
  for (const OptionRow& row : option_rows())
    EXPECT_NE(docs.find(std::string("| `--") + row.name + "` |"), docs.npos) << row.name;
}

TEST(OptionDocs, EverySectionHasAnExampleWhoseOptionsItsVerbTakes) {
  std::istringstream lines(option_docs());
  std::string section;
  int sections = 0, examples = 0;
  for (std::string line; std::getline(lines, line);) {
    if (line.starts_with("## ")) section = line.substr(3), sections += !section.starts_with("Names of ");
    if (!line.starts_with("    ")) continue;
    ++examples;
    std::istringstream words(line);
    std::string program, name, word;
    words >> program >> name;
    const auto verb =
        std::ranges::find(verb_names(), name, [](const VerbName& each) { return std::string(each.name); });
    ASSERT_NE(verb, verb_names().end()) << line;
    bool of_section = section == "TRL's formulas";  // set by TRL's names
    while (words >> word) {
      if (!word.starts_with("--") || is_alias(word.substr(2))) continue;
      const OptionRow* row = find_option(word.substr(2));
      ASSERT_TRUE(row && row->taken_by(verb->letter)) << section << ": " << word;
      of_section |= section == section_of(*row);
    }
    EXPECT_TRUE(of_section) << section;
  }
  EXPECT_EQ(examples, sections);
}

TEST(OptionDocs, TheCommittedPageIsWhatTheTableGives) {
  std::ifstream file(testing::source_dir() + "/docs/options.md");
  std::ostringstream page;
  page << file.rdbuf();
  EXPECT_EQ(page.str(), option_docs()) << "write it anew: option_docs > docs/options.md";
}

}  // namespace
}  // namespace espalier
