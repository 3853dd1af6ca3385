// Options that are one of a few words.
#include "espalier/options/choices.h"

#include <gtest/gtest.h>

#include "espalier/base/error.h"
#include "espalier/options/options.h"

namespace espalier {
namespace {

template <class E>
void expect_every_word_names_its_value(const std::string& option) {
  std::size_t place = 0;
  for (const std::string word : words_of(E{})) {
    EXPECT_EQ(name_of(static_cast<E>(place)), word);
    EXPECT_TRUE(Choice<E>(word) == static_cast<E>(place));
    if (!word.empty()) {
      Options options;
      set_option(options, option, word);
      EXPECT_EQ(option_text(options, option), word);
    }
    ++place;
  }
  Options options;
  EXPECT_THROW(set_option(options, option, "nonsense"), OptionError);
}

TEST(Choices, EveryWordNamesItsValue) {
  expect_every_word_names_its_value<DType>("dtype");
  expect_every_word_names_its_value<SaveDType>("save-dtype");
  expect_every_word_names_its_value<Schedule>("schedule");
  expect_every_word_names_its_value<SavedState>("trunk-state");
  expect_every_word_names_its_value<ShareMode>("share");
  expect_every_word_names_its_value<Estimator>("adv-estimator");
  expect_every_word_names_its_value<PolicyLoss>("policy-loss");
  expect_every_word_names_its_value<Aggregation>("loss-agg-mode");
  expect_every_word_names_its_value<KlLossType>("kl-loss-type");
  expect_every_word_names_its_value<RolloutCorrection>("rollout-is");
  expect_every_word_names_its_value<AuxScope>("router-aux-loss-scope");
}

TEST(Choices, ARowMayTakeSomeOfTheWordsOfItsType) {
  Options options;
  set_option(options, "wave-state", "recompute");
  EXPECT_EQ(options.wave_state, SavedState::recompute);
  EXPECT_THROW(set_option(options, "wave-state", "offload"), OptionError);
  EXPECT_THROW(set_option(options, "wave-state", "nonsense"), OptionError);
  EXPECT_EQ(options.wave_state, SavedState::recompute);
}

TEST(Choices, TheEmptyWordIsNotOffered) {
  EXPECT_EQ(joined(words_of(Aggregation{})).substr(0, 11), "token-mean|");
  EXPECT_EQ(joined(words_of(ShareMode{})), "auto|prompt|off");
}

TEST(Choices, APolicyLossBringsItsAggregation) {
  Options options;
  EXPECT_EQ(policy_aggregation(options), Aggregation::token_mean);
  options.policy_loss = PolicyLoss::gspo;
  EXPECT_EQ(policy_aggregation(options), Aggregation::seq_mean_token_mean);
  options.loss_agg_mode = Aggregation::token_sum;
  EXPECT_EQ(policy_aggregation(options), Aggregation::token_sum);
  options.policy_loss = PolicyLoss::sapo;
  EXPECT_THROW(policy_aggregation(options), OptionError);
}

}  // namespace
}  // namespace espalier
