#include "espalier/settings/config_file.h"

#include <unistd.h>

#include <filesystem>
#include <fstream>

#include "espalier/settings/option_help.h"
#include "tests/unit/options/thrown_error.h"

namespace espalier {
namespace {

using testing::thrown_error;

class ConfigFile : public ::testing::Test {
 protected:
  void SetUp() override {
    path_ = std::filesystem::temp_directory_path() / ("espalier_config_" + std::to_string(getpid()) + ".toml");
  }
  void TearDown() override { std::filesystem::remove(path_); }

  std::vector<OptionSetting> read(const std::string& text, const std::string& verb = "train", char letter = 't') {
    std::ofstream(path_) << text;
    return read_config(path_.string(), verb, letter, {"inspect", "train", "verify"});
  }
  Options options(const std::string& text, const std::string& verb = "train", char letter = 't') {
    Options result;
    std::vector<std::string> notes;
    apply_settings(result, read(text, verb, letter), notes);
    return result;
  }
  std::string place(int line) const { return path_.string() + ":" + std::to_string(line); }

  std::filesystem::path path_;
};

TEST_F(ConfigFile, SetsOptionsOfEveryType) {
  const Options result = options(
      "lr = 2e-6\nseed = 7\nbetas = [0.9, 0.95]\ndecay_matrices_only = true\nclip-ratio-high = 0.28\n"
      "model = \"a b\"\nmemory_budget = \"8GiB\"\nmax-grad-norm = 1\n");
  EXPECT_EQ(result.lr, 2e-6);
  EXPECT_EQ(result.seed, 7);
  EXPECT_EQ(parse_numbers("betas", result.betas), (std::vector<double>{0.9, 0.95}));
  EXPECT_TRUE(result.decay_matrices_only);
  EXPECT_EQ(result.clip_ratio_high, 0.28);
  EXPECT_EQ(result.model, "a b");
  EXPECT_EQ(result.memory_budget, "8GiB");
}

TEST_F(ConfigFile, ATableOfTheVerbWinsAndOthersAreLeftOut) {
  const std::string text = "[train]\nlr = 3\n[verify]\nlr = 5\n";
  EXPECT_EQ(options("lr = 1\n" + text).lr, 3);
  EXPECT_EQ(options("lr = 1\n" + text, "verify", 'v').lr, 5);
}

TEST_F(ConfigFile, ATopLevelKeyOfOtherVerbsIsLeftOut) {
  EXPECT_TRUE(read("lr = 1\n", "inspect", 'i').empty());
  const ErrorText text = thrown_error<OptionError>([&] { read("[inspect]\nlr = 1\n", "inspect", 'i'); });
  EXPECT_EQ(text.where, place(2) + ": lr");
}

TEST_F(ConfigFile, AnUnknownKeyIsRefusedWithItsLineAndTheNearestName) {
  const ErrorText text = thrown_error<OptionError>([&] { read("lr = 1\n\nclip_ratio_hig = 2\n"); });
  EXPECT_EQ(text.where, place(3) + ": clip_ratio_hig");
  EXPECT_EQ(text.remedy, "did you mean clip-ratio-high?");
  EXPECT_EQ(thrown_error<OptionError>([&] { read("[tran]\nlr = 1\n"); }).remedy, "did you mean train?");
  EXPECT_THROW(read("[verify]\nno_such_option = 1\n"), OptionError);
}

TEST_F(ConfigFile, AWrongValueIsRefusedWithItsLine) {
  const ErrorText text = thrown_error<OptionError>([&] { options("seed = 1\nlr = \"fast\"\n"); });
  EXPECT_EQ(text.where, place(2) + ": --lr");
  EXPECT_THROW(read("lr = 2020-01-01\n"), OptionError);
  EXPECT_THROW(read("betas = [[1], 2]\n"), OptionError);
  EXPECT_THROW(options("lr = nan\n"), OptionError);
}

TEST_F(ConfigFile, WhatIsNoTomlIsRefusedWithItsLine) {
  EXPECT_EQ(thrown_error<OptionError>([&] { read("lr = 1\nseed =\n"); }).where, place(2));
}

TEST_F(ConfigFile, TakesTheNamesOfTrl) { EXPECT_EQ(options("beta = 0.04\n").kl_loss_coef, 0.04); }

TEST_F(ConfigFile, TheTextOfAllOptionsReadsBackAsTheSameOptions) {
  Options given;
  given.lr = 1.0 / 3, given.seed = 9007199254740993, given.betas = "0.9,0.95", given.decay_matrices_only = true;
  given.rollouts = std::string("a b,c") + kBetweenPaths + "-";
  given.model = "a \"quoted\" \\ path\twith\ncontrol", given.memory_budget = "8GiB", given.n = "2,8";
  for (const auto& [letter, name] : verb_names()) {
    const std::string text = config_text(given, name, letter);
    Options back = given;
    for (const OptionRow& row : option_rows())
      if (row.taken_by(letter)) set_option(back, row.name, row.default_text);
    std::vector<std::string> notes;
    std::ofstream(path_) << text;
    apply_settings(back, read_config(path_.string(), name, letter, {"inspect", "train", "verify"}), notes);
    for (const OptionRow& row : option_rows())
      if (row.type == OptionType::list)
        EXPECT_EQ(parse_numbers("", option_text(back, row.name)), parse_numbers("", option_text(given, row.name)));
      else
        EXPECT_EQ(option_text(back, row.name), option_text(given, row.name)) << name << ' ' << row.name;
    EXPECT_TRUE(notes.empty());
  }
}

TEST_F(ConfigFile, AnEmptyFileSetsNothing) { EXPECT_TRUE(read("").empty()); }

TEST_F(ConfigFile, AMissingFileAndAFolderAreInputErrors) {
  EXPECT_THROW(read_config(path_.string() + ".none", "train", 't', {"train"}), InputError);
  EXPECT_THROW(read_config(path_.parent_path().string(), "train", 't', {"train"}), InputError);
}

}  // namespace
}  // namespace espalier
