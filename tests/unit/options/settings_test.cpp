#include "espalier/options/settings.h"

#include "tests/unit/options/thrown_error.h"

namespace espalier {
namespace {

// The defaults after settings of one source, with the number of notes.
struct Applied {
  Options options;
  std::vector<std::string> notes;
};
Applied applied(const std::vector<OptionSetting>& settings) {
  Applied result;
  apply_settings(result.options, settings, result.notes);
  return result;
}

TEST(Aliases, EpsilonSetsBothSidesUnlessEpsilonHighIsGiven) {
  Applied both = applied({{"epsilon", "0.1", ""}});
  EXPECT_EQ(both.options.clip_ratio_low, 0.1);
  EXPECT_EQ(both.options.clip_ratio_high, 0.1);
  EXPECT_FALSE(both.notes.empty());
  for (const char* high : {"epsilon_high", "epsilon-high"}) {
    Applied apart = applied({{high, "0.28", ""}, {"epsilon", "0.1", ""}});
    EXPECT_EQ(apart.options.clip_ratio_low, 0.1);
    EXPECT_EQ(apart.options.clip_ratio_high, 0.28);
  }
  Applied high_alone = applied({{"epsilon_high", "0.28", ""}});
  EXPECT_EQ(high_alone.options.clip_ratio_low, Options{}.clip_ratio_low);
  EXPECT_EQ(high_alone.options.clip_ratio_high, 0.28);
}

TEST(Aliases, BetaIsTheKlCoefficientAndDeltaTheDualClip) {
  const Applied result = applied({{"beta", "0.04", ""}, {"delta", "4", ""}});
  EXPECT_EQ(result.options.kl_loss_coef, 0.04);
  EXPECT_EQ(result.options.clip_ratio_c, 4);
  ASSERT_EQ(result.notes.size(), 2u);
  EXPECT_NE(result.notes[1].find("clip-ratio-high"), std::string::npos);  // says when the meanings agree
}

TEST(Aliases, LossTypeNamesTheAggregation) {
  const std::vector<std::pair<const char*, const char*>> expected = {
      {"grpo", "seq-mean-token-mean"},        {"dapo", "token-mean"},  {"bnpo", "token-mean"},
      {"dr_grpo", "seq-mean-token-sum-norm"}, {"cispo", "token-mean"}, {"sapo", ""}};
  for (const auto& [type, mode] : expected) {
    const Applied result = applied({{"loss_type", type, ""}});
    EXPECT_EQ(result.options.loss_agg_mode, mode) << type;
    const std::string loss = type;
    EXPECT_EQ(result.options.policy_loss, loss == "cispo" || loss == "sapo" ? loss : "vanilla");
    EXPECT_NO_THROW(validate(result.options)) << type;
  }
  EXPECT_THROW(applied({{"loss_type", "luspo", ""}}), UnsupportedError);
  EXPECT_THROW(applied({{"loss_type", "ppo", ""}}), OptionError);
}

TEST(Aliases, CispoOfTrlClipsOnlyAboveAtTheCapItself) {
  const Applied result = applied({{"loss_type", "cispo", ""}, {"epsilon_high", "5", ""}, {"epsilon", "0.2", ""}});
  EXPECT_EQ(result.options.clip_ratio_low, 1);
  EXPECT_EQ(result.options.clip_ratio_high, 4);
  EXPECT_THROW(applied({{"loss_type", "cispo", ""}, {"epsilon_high", "0.2", ""}}), OptionError);
}

TEST(Aliases, ScaleRewardsNamesTheEstimator) {
  for (const char* value : {"group", "true", "True"})
    EXPECT_EQ(applied({{"adv-estimator", "", ""}, {"scale_rewards", value, ""}}).notes.size(), 1u);
  EXPECT_EQ(applied({{"scale_rewards", "group", ""}}).options.adv_estimator, "grpo");
  for (const char* value : {"none", "false", "False"})
    EXPECT_EQ(applied({{"scale_rewards", value, ""}}).options.adv_estimator, "dr_grpo") << value;
  EXPECT_THROW(applied({{"scale_rewards", "batch", ""}}), UnsupportedError);
  EXPECT_THROW(applied({{"scale_rewards", "often", ""}}), OptionError);
}

TEST(Settings, OwnNamesWinOverAliasesOfOneSource) {
  EXPECT_EQ(applied({{"clip-ratio-low", "0.3", ""}, {"epsilon", "0.1", ""}}).options.clip_ratio_low, 0.3);
}

TEST(Settings, TheLastOfTwoWins) {
  EXPECT_EQ(applied({{"lr", "1", ""}, {"lr", "2", ""}}).options.lr, 2);
  EXPECT_EQ(applied({{"beta", "1", ""}, {"beta", "2", ""}}).options.kl_loss_coef, 2);
}

TEST(Settings, ALaterSourceWins) {
  Applied result = applied({{"lr", "1", "run.toml:1: "}});
  apply_settings(result.options, {{"lr", "2", ""}}, result.notes);
  EXPECT_EQ(result.options.lr, 2);
}

TEST(Aliases, AWrongValueIsReportedUnderEspaliersName) {
  const ErrorText text = testing::thrown_error<OptionError>([] { applied({{"epsilon", "two", "run.toml:4: "}}); });
  EXPECT_EQ(text.where, "run.toml:4: --clip-ratio-low");
}

}  // namespace
}  // namespace espalier
