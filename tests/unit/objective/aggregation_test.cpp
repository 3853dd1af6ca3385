// The loss of a mini-batch as a sum: aggregation, masks, absent fields, and freedom of order.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <random>
#include <vector>

#include "espalier/base/error.h"
#include "espalier/objective/objective.h"
#include "espalier/objective/value_loss.h"
#include "rollout_examples.h"

namespace espalier {
namespace {

// Three rollouts with 2, 1 and 0 loss tokens, and an empty one. Loss gpg: a token's part is -A lp.
struct Example {
  std::vector<Rollout> batch = {make_rollout(2), make_rollout(3), make_rollout(4), make_rollout(0)};
  std::vector<std::vector<double>> advantages = {{1, 2}, {5, 3, 5}, {9, 9, 9, 9}, {}};
  std::vector<std::vector<double>> logprobs = {{-1, -2}, {-7, -4, -7}, {-1, -1, -1, -1}, {}};
  Options options;

  Example() {
    batch[1].loss_mask = {0, 1, 0};
    batch[2].loss_mask = {0, 0, 0, 0};
    options.policy_loss = "gpg";
  }

  LossParts run(std::vector<std::vector<TokenGradient>>* gradients = nullptr) const {
    Objective objective(batch, advantages, options);
    if (gradients) gradients->assign(batch.size(), {});
    for (std::size_t i = 0; i < batch.size(); ++i)
      for (std::size_t t = 0; t < logprobs[i].size(); ++t) {
        const TokenGradient gradient =
            objective.add_token(static_cast<int>(i), static_cast<int>(t), logprobs[i][t], 0.5);
        if (gradients) (*gradients)[i].push_back(gradient);
      }
    return objective.parts();
  }
};

// Token parts are 1, 4 and 12.
TEST(Aggregation, DividesByTheTotalsOfTheMiniBatch) {
  Example example;
  const std::pair<const char*, double> expected[] = {
      {"token-mean", 17.0 / 3},
      {"token-sum", 17.0},
      {"seq-mean-token-sum", 17.0 / 4},
      {"seq-mean-token-sum-norm", 17.0 / 4 / 4},  // the longest response has 4 tokens
      {"seq-mean-token-mean", (5.0 / (2 + 1e-8) + 12.0 / (1 + 1e-8)) / 4}};
  for (const auto& [mode, loss] : expected) {
    example.options.loss_agg_mode = mode;
    const LossParts parts = example.run();
    EXPECT_DOUBLE_EQ(parts.loss, loss) << mode;
    EXPECT_DOUBLE_EQ(parts.pg_loss, loss) << mode;
    EXPECT_EQ(parts.loss_tokens, 3) << mode;
    EXPECT_EQ(parts.kl_loss, 0.0) << mode;
  }
  example.options.loss_agg_mode = "seq-mean-token-sum-norm";
  example.options.loss_scale_factor = 10;
  EXPECT_DOUBLE_EQ(example.run().loss, 17.0 / 4 / 10);
}

// Token parts are 1, 4 and 12; the divisor of rollouts that have none recorded is their loss tokens, here 1, 0 and 0.
TEST(Aggregation, TokenMeanDividesByWhatTheRecordsHave) {
  Example example;
  example.batch[0].token_divisor = 6.5;
  EXPECT_DOUBLE_EQ(example.run().loss, 17.0 / 7.5);
  example.options.entropy_agg_mode = "token-mean";  // the entropy's own mean stays one over its tokens
  example.options.entropy_coeff = 2;
  EXPECT_DOUBLE_EQ(example.run().loss, 17.0 / 7.5 - 2 * 0.5);
  example.options.token_mean_divisor = 5;
  EXPECT_DOUBLE_EQ(example.run().pg_loss, 17.0 / 5);
  example.options.loss_agg_mode = "token-sum";
  example.options.token_mean_divisor = 0;
  EXPECT_DOUBLE_EQ(example.run().pg_loss, 17.0);
}

// Token parts are 1, 4 and 12, of rollouts 0, 0 and 1. A window may hold parts of two generation batches.
TEST(Aggregation, NumItemsInBatchTimesItsScaleDividesEachRolloutsTokens) {
  Example example;
  for (Rollout& rollout : example.batch) rollout.num_items_in_batch = 10;
  example.options.token_divisor_scale = 0.5;
  EXPECT_DOUBLE_EQ(example.run().loss, 17.0 / 5);
  example.batch[1].num_items_in_batch = 30;
  EXPECT_DOUBLE_EQ(example.run().loss, 5.0 / 5 + 12.0 / 15);
  example.options.entropy_agg_mode = "token-mean";
  example.options.entropy_coeff = 2;
  EXPECT_DOUBLE_EQ(example.run().loss, 5.0 / 5 + 12.0 / 15 - 2 * 0.5);
  example.options.token_divisor_scale = 0;
  EXPECT_DOUBLE_EQ(example.run().pg_loss, 17.0 / 3);
  example.options.token_mean_divisor = 4;
  EXPECT_DOUBLE_EQ(example.run().pg_loss, 17.0 / 4);
}

TEST(Aggregation, NumItemsInBatchWithoutAScaleIsTheMiniBatchsOwnOrRefused) {
  Example example;
  for (Rollout& rollout : example.batch) rollout.num_items_in_batch = 3;
  EXPECT_DOUBLE_EQ(example.run().loss, 17.0 / 3);
  example.batch[2].num_items_in_batch = 4;
  EXPECT_THROW(example.run(), InputError);
  example.options.token_divisor_scale = 1;
  EXPECT_DOUBLE_EQ(example.run().loss, 17.0 / 3);  // of a rollout without loss tokens
  example.batch[3].num_items_in_batch.reset();
  EXPECT_THROW(example.run(), InputError);
  example.options.loss_agg_mode = "token-sum";
  EXPECT_DOUBLE_EQ(example.run().loss, 17.0);
}

// Squares (v - R)^2 are 1, 4 and 9 where there is a loss token.
TEST(Aggregation, TheCriticHasTheDivisorsOfTheActor) {
  Example example;
  std::vector<std::vector<double>> targets;
  for (Rollout& rollout : example.batch) {
    rollout.values.assign(rollout.response_ids.size(), 0.0);
    targets.emplace_back(rollout.response_ids.size(), 0.0);
  }
  const std::vector<std::vector<double>> values = {{1, 2}, {7, 3, 7}, {7, 7, 7, 7}, {}};
  example.options.cliprange_value = 100;
  const auto loss = [&] {
    ValueObjective objective(example.batch, targets, example.options);
    for (std::size_t i = 0; i < values.size(); ++i)
      for (std::size_t t = 0; t < values[i].size(); ++t)
        objective.add_token(static_cast<int>(i), static_cast<int>(t), values[i][t]);
    return objective.parts().loss;
  };
  EXPECT_DOUBLE_EQ(loss(), 14.0 / 2 / 3);
  example.batch[0].token_divisor = 6.5;
  EXPECT_DOUBLE_EQ(loss(), 14.0 / 2 / 7.5);
  example.options.token_mean_divisor = 5;
  EXPECT_DOUBLE_EQ(loss(), 14.0 / 2 / 5);
  example.options.token_mean_divisor = 0;
  for (Rollout& rollout : example.batch) rollout.num_items_in_batch = 20;
  example.options.token_divisor_scale = 0.5;
  EXPECT_DOUBLE_EQ(loss(), 14.0 / 2 / 10);
  example.options.loss_agg_mode = "seq-mean-token-mean";
  example.options.token_count_epsilon = 1;
  EXPECT_DOUBLE_EQ(loss(), (5.0 / 3 + 9.0 / 2) / 2 / 4);
}

TEST(Aggregation, DefaultsToTokenMeanAndForSequenceLossesToSequenceMean) {
  Example example;
  EXPECT_DOUBLE_EQ(example.run().loss, 17.0 / 3);
  example.options.policy_loss = "sapo";  // no old log-probs: ratio 1, a token's part is -2 A or 2 / 1.05 A
  EXPECT_DOUBLE_EQ(example.run().loss, -2 * ((1 + 2) / (2 + 1e-8) + 3 / (1 + 1e-8)) / 4);
}

TEST(Aggregation, EntropyAndKlUseTheSameModeWithTheirCoefficients) {
  Example example;
  for (Rollout& rollout : example.batch) rollout.ref_logprobs.assign(rollout.response_ids.size(), -3.0);
  example.options.kl_loss_coef = 0.25;
  example.options.kl_loss_type = "kl";
  example.options.entropy_coeff = 0.5;
  std::vector<std::vector<TokenGradient>> gradients;
  const LossParts parts = example.run(&gradients);
  EXPECT_DOUBLE_EQ(parts.kl_loss, (2.0 + 1.0 - 1.0) / 3);
  EXPECT_DOUBLE_EQ(parts.entropy, 0.5);
  EXPECT_DOUBLE_EQ(parts.loss, 17.0 / 3 - 0.5 * 0.5 + 0.25 * (2.0 / 3));
  EXPECT_DOUBLE_EQ(gradients[1][1].logprob, (-3.0 + 0.25) / 3);
  EXPECT_DOUBLE_EQ(gradients[1][1].entropy, -0.5 / 3);
}

TEST(Aggregation, MaskedTokensAddNothingWhateverTheyHold) {
  Example example;
  const double loss = example.run().loss;
  example.logprobs[1][0] = -1e30;
  example.advantages[2][3] = 1e30;
  std::vector<std::vector<TokenGradient>> gradients;
  EXPECT_EQ(example.run(&gradients).loss, loss);
  EXPECT_EQ(gradients[1][0].logprob, 0.0);
  EXPECT_EQ(gradients[2][3].logprob, 0.0);
  EXPECT_EQ(gradients[2][3].entropy, 0.0);
}

TEST(Aggregation, NoLossTokensGiveZeroLossAndZeroGradient) {
  for (const char* mode :
       {"token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-sum-norm", "seq-mean-token-mean"}) {
    Example example;
    example.options.loss_agg_mode = mode;
    for (Rollout& rollout : example.batch) std::fill(rollout.loss_mask.begin(), rollout.loss_mask.end(), 0);
    std::vector<std::vector<TokenGradient>> gradients;
    const LossParts parts = example.run(&gradients);
    EXPECT_EQ(parts.loss, 0.0) << mode;
    EXPECT_EQ(parts.clip_fraction, 0.0) << mode;
    EXPECT_EQ(parts.loss_tokens, 0) << mode;
    for (const auto& series : gradients)
      for (const TokenGradient& gradient : series) EXPECT_EQ(gradient.logprob, 0.0) << mode;
  }
}

TEST(Aggregation, ABatchOfEmptyResponsesIsZeroInEveryMode) {
  const std::vector<Rollout> batch = {make_rollout(0), make_rollout(0)};
  const std::vector<std::vector<double>> advantages(2);
  for (const char* mode : {"token-mean", "seq-mean-token-sum-norm", "seq-mean-token-mean"}) {
    Options options;
    options.loss_agg_mode = mode;
    EXPECT_EQ(Objective(batch, advantages, options).parts().loss, 0.0) << mode;
  }
}

TEST(Aggregation, ClipFractionIsTheShareOfLossTokens) {
  std::vector<Rollout> batch = {make_rollout(4)};
  batch[0].old_logprobs = {-1, -1, -1, -1};
  batch[0].loss_mask = {1, 1, 1, 0};
  const std::vector<std::vector<double>> advantages = {{1, 1, -1, 1}};
  Objective objective(batch, advantages, Options{});
  // Ratios e, 1, e, e: only the first is clipped (the third helps the other way, the fourth is masked).
  const double logprobs[] = {0, -1, 0, 0};
  for (int t = 0; t < 4; ++t) objective.add_token(0, t, logprobs[t], 0);
  EXPECT_DOUBLE_EQ(objective.parts().clip_fraction, 1.0 / 3);
}

TEST(Aggregation, AbsentOldLogProbsGiveRatioOneWithItsGradient) {
  for (const char* loss : {"vanilla", "gspo"}) {
    const std::vector<Rollout> batch = {make_rollout(2)};
    const std::vector<std::vector<double>> advantages = {{1.5, -2}};
    Options options;
    options.policy_loss = loss;
    options.loss_agg_mode = "token-mean";
    Objective objective(batch, advantages, options);
    const std::vector<double> logprob = {-3, -0.1}, entropy = {0, 0};
    std::vector<double> grad_logprob(2), grad_entropy(2);
    objective.add_rollout(0, logprob, entropy, grad_logprob, grad_entropy);
    EXPECT_DOUBLE_EQ(objective.parts().loss, (-1.5 + 2) / 2) << loss;
    EXPECT_DOUBLE_EQ(grad_logprob[0], -0.75) << loss;
    EXPECT_DOUBLE_EQ(grad_logprob[1], 1.0) << loss;
  }
}

TEST(Aggregation, SequenceWeightsWithoutOldLogProbsNeedTheWholeRollout) {
  std::vector<Rollout> batch = {make_rollout(2)};
  const std::vector<std::vector<double>> advantages = {{1, 1}};
  batch[0].rollout_logprobs = {-1, -2};
  Options options;
  options.rollout_is = "sequence";
  options.rollout_is_threshold = 1e9;
  Objective without_old(batch, advantages, options);
  EXPECT_TRUE(without_old.needs_whole_rollout());
  const std::vector<double> logprob = {-0.5, -2.25}, entropy = {0, 0};
  std::vector<double> grad_logprob(2), grad_entropy(2);
  without_old.add_rollout(0, logprob, entropy, grad_logprob, grad_entropy);
  EXPECT_DOUBLE_EQ(grad_logprob[0], -std::exp(0.5 - 0.25) / 2);

  batch[0].old_logprobs = {-1.5, -2};
  Objective with_old(batch, advantages, options);
  EXPECT_FALSE(with_old.needs_whole_rollout());
  EXPECT_DOUBLE_EQ(with_old.add_token(0, 0, -1.5, 0).logprob, -std::exp(-0.5) / 2);
}

// A token whose sampler's log-prob was not recorded (NaN) has weight 1, and adds nothing to a rollout's.
TEST(Aggregation, UnrecordedLogProbsOfTheSamplerHaveWeightOne) {
  std::vector<Rollout> batch = {make_rollout(2)};
  const std::vector<std::vector<double>> advantages = {{1, 1}};
  batch[0].rollout_logprobs = {std::numeric_limits<double>::quiet_NaN(), -2};
  Options options;
  options.rollout_is_threshold = 1e9;
  const std::vector<double> logprob = {-0.5, -2.25}, entropy = {0, 0};
  for (const bool with_old : {false, true}) {
    if (with_old) batch[0].old_logprobs = logprob;
    for (const char* level : {"token", "sequence"}) {
      options.rollout_is = level;
      std::vector<double> grad_logprob(2), grad_entropy(2);
      Objective objective(batch, advantages, options);
      objective.add_rollout(0, logprob, entropy, grad_logprob, grad_entropy);
      const double other = std::exp(-0.25);
      EXPECT_DOUBLE_EQ(grad_logprob[0], -(options.rollout_is == "token" ? 1 : other) / 2) << level << with_old;
      EXPECT_DOUBLE_EQ(grad_logprob[1], -other / 2) << level << with_old;
    }
  }
}

// L = -(1/2) A s (w_1 + w_2), s = exp(mean of lp - old): dL/dlp_t = -(1/2) A s (w_1 + w_2) / 2 for both tokens; gspo of
// verl gives each token its own weight.
TEST(Aggregation, ARatioOfTheRolloutGivesEveryTokenTheMeanWeight) {
  std::vector<Rollout> batch = {make_rollout(2)};
  batch[0].old_logprobs = {-1, -1};
  batch[0].rollout_logprobs = {-1 - std::log(1.5), -1 - std::log(0.5)};
  const std::vector<std::vector<double>> advantages = {{1, 1}};
  Options options;
  options.rollout_is = "token";
  const std::vector<double> logprob = {-1, -1}, entropy = {0, 0};
  std::vector<double> gradient(2), grad_entropy(2);
  const auto run = [&] {
    Objective objective(batch, advantages, options);
    objective.add_rollout(0, logprob, entropy, gradient, grad_entropy);
    EXPECT_NEAR(objective.parts().loss, -1, 1e-15);
  };
  options.ratio_level = "sequence";
  run();
  EXPECT_NEAR(gradient[0], -0.5, 1e-15);
  EXPECT_EQ(gradient[0], gradient[1]);
  options.ratio_level = "token";
  options.policy_loss = "gspo";
  options.loss_agg_mode = "token-mean";
  run();
  EXPECT_NEAR(gradient[0], -0.75, 1e-15);
  EXPECT_NEAR(gradient[1], -0.25, 1e-15);
}

TEST(Aggregation, OrderOfTokensDoesNotShowInTheParts) {
  std::mt19937_64 random(7);
  std::normal_distribution<double> normal;
  std::vector<Rollout> batch;
  std::vector<std::vector<double>> advantages, logprobs;
  std::vector<std::pair<int, int>> tokens;
  for (int i = 0; i < 40; ++i) {
    batch.push_back(make_rollout(25));
    for (int t = 0; t < 25; ++t) {
      batch.back().loss_mask[t] = random() % 4 != 0;
      batch.back().old_logprobs.push_back(-1 + normal(random));
      batch.back().ref_logprobs.push_back(-1 + normal(random));
      tokens.emplace_back(i, t);
    }
    advantages.emplace_back(25, 1e3 * normal(random));
    logprobs.emplace_back(25, -1 + 2 * normal(random));
  }
  Options options;
  options.kl_loss_coef = 0.1;
  options.entropy_coeff = 0.01;
  const auto run = [&] {
    Objective objective(batch, advantages, options);
    for (const auto& [i, t] : tokens) objective.add_token(i, t, logprobs[i][t], 2.0 + 0.001 * t);
    return objective.parts();
  };
  const LossParts first = run();
  for (int repeat = 0; repeat < 5; ++repeat) {
    std::shuffle(tokens.begin(), tokens.end(), random);
    const LossParts again = run();
    // Compensated sums: the last place at most.
    EXPECT_DOUBLE_EQ(again.loss, first.loss);
    EXPECT_DOUBLE_EQ(again.pg_loss, first.pg_loss);
    EXPECT_DOUBLE_EQ(again.kl_loss, first.kl_loss);
    EXPECT_DOUBLE_EQ(again.entropy, first.entropy);
    EXPECT_EQ(again.clip_fraction, first.clip_fraction);
  }
}

}  // namespace
}  // namespace espalier
