#include "espalier/options/option_help.h"

#include <fstream>
#include <sstream>

#include "espalier/options/options.h"
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

TEST(OptionDocs, TheCommittedPageIsWhatTheTableGives) {
  std::ifstream file(ESPALIER_SOURCE_DIR "/docs/options.md");
  std::ostringstream page;
  page << file.rdbuf();
  EXPECT_EQ(page.str(), option_docs()) << "write it anew: option_docs > docs/options.md";
}

}  // namespace
}  // namespace espalier
