// GAE, its whitening and the critic's targets against a plain loop that walks whole series as verl does: masked tokens
// are carried over, not left out. docs/objectives.md (6), (8), (30).
#include <gtest/gtest.h>

#include <cmath>
#include <string>
#include <vector>

#include "espalier/base/error.h"
#include "espalier/base/random.h"
#include "espalier/objective/objective.h"
#include "espalier/objective/value_loss.h"
#include "rollout_examples.h"

namespace espalier {
namespace {

using Series = std::vector<std::vector<double>>;

struct Reference {
  Series advantages, returns;
};

// delta_t = r_t + gamma V_next - V_t; A_t = m (delta + gamma lam A_next) + (1 - m) A_next; V_next moves on loss tokens
// only; R = A + V; then A is whitened over loss tokens with Bessel's correction.
Reference plain_gae(const std::vector<Rollout>& rollouts, double gamma, double lam) {
  Reference out;
  double tokens = 0, sum = 0, squares = 0;
  for (const Rollout& r : rollouts) {
    const int length = r.response_length();
    std::vector<double> reward(length), advantage(length), returns(length);
    int last = -1;
    for (int t = 0; t < length; ++t)
      if (r.loss_mask[t]) last = t;
    if (last >= 0) reward[last] = *r.reward;
    double next_value = 0, carried = 0;
    for (int t = length - 1; t >= 0; --t) {
      const double m = r.loss_mask[t];
      const double delta = reward[t] + gamma * next_value - r.values[t];
      const double here = delta + gamma * lam * carried;
      next_value = m * r.values[t] + (1 - m) * next_value;
      carried = m * here + (1 - m) * carried;
      advantage[t] = carried;
      returns[t] = carried + r.values[t];
      tokens += m, sum += m * carried;
    }
    out.advantages.push_back(advantage);
    out.returns.push_back(returns);
  }
  const double mean = sum / tokens;
  for (std::size_t i = 0; i < rollouts.size(); ++i)
    for (std::size_t t = 0; t < out.advantages[i].size(); ++t)
      if (rollouts[i].loss_mask[t]) squares += std::pow(out.advantages[i][t] - mean, 2);
  for (auto& series : out.advantages)
    for (double& a : series) a = (a - mean) / std::sqrt(squares / (tokens - 1) + 1e-8);
  return out;
}

std::vector<Rollout> random_rollouts(std::uint64_t seed) {
  Random random(seed);
  std::vector<Rollout> rollouts;
  for (int i = 0; i < 12; ++i) {
    rollouts.push_back(make_rewarded(static_cast<int>(random.integer(0, 9)), random.normal()));
    for (auto& m : rollouts.back().loss_mask) m = random.chance(0.7);
    for (int t = 0; t < rollouts.back().response_length(); ++t) rollouts.back().values.push_back(random.normal());
  }
  return rollouts;
}

// Chains of ten steps on numbers near 1, sums of 60 terms: far below 1e-13.
constexpr double kRoundingOfSums = 1e-13;

TEST(Gae, AdvantagesAndTargetsAreThoseOfAPlainLoop) {
  for (std::uint64_t seed = 1; seed <= 20; ++seed)
    for (const auto& [gamma, lam] : {std::pair(1.0, 1.0), {0.9, 0.8}, {0.97, 0.0}, {0.0, 1.0}}) {
      const std::vector<Rollout> rollouts = random_rollouts(seed);
      Options options;
      options.adv_estimator = "gae", options.gamma = gamma, options.lam = lam;
      const Reference expected = plain_gae(rollouts, gamma, lam);
      const Series advantages = compute_advantages(rollouts, options),
                   targets = compute_value_targets(rollouts, options);
      for (std::size_t i = 0; i < rollouts.size(); ++i)
        for (std::size_t t = 0; t < advantages[i].size(); ++t) {
          if (!rollouts[i].loss_mask[t]) continue;
          EXPECT_NEAR(advantages[i][t], expected.advantages[i][t], kRoundingOfSums) << "seed " << seed;
          EXPECT_NEAR(targets[i][t], expected.returns[i][t], kRoundingOfSums) << "seed " << seed;
        }
    }
}

TEST(Gae, WithoutDiscountEveryTargetIsTheReward) {
  Options options;  // gamma = lam = 1
  for (const Rollout& rollout : random_rollouts(31)) {
    const Series targets = compute_value_targets({&rollout, 1}, options);
    for (std::size_t t = 0; t < targets[0].size(); ++t)
      if (rollout.loss_mask[t]) {
        EXPECT_NEAR(targets[0][t], *rollout.reward, kRoundingOfSums);
      }
  }
}

TEST(ValueTargets, RecordedReturnsWin) {
  std::vector<Rollout> rollouts = {make_rollout(2)};
  rollouts[0].returns = {0.25, -3};
  EXPECT_EQ(compute_value_targets(rollouts, {})[0], rollouts[0].returns);
}

TEST(ValueTargets, WhatIsMissingIsNamedWithItsLine) {
  const auto message = [](const Rollout& rollout) -> std::string {
    try {
      compute_value_targets({&rollout, 1}, {});
    } catch (const InputError& error) {
      return error.what();
    }
    return "";
  };
  Rollout no_values = make_rewarded(2, 1), no_reward = make_rollout(2);
  no_reward.values = {0, 0};
  for (const auto& [rollout, missing] : {std::pair(no_values, "values"), {no_reward, "reward"}}) {
    EXPECT_NE(message(rollout).find("example.jsonl:1"), std::string::npos);
    EXPECT_NE(message(rollout).find("--critic"), std::string::npos);
    EXPECT_NE(message(rollout).find(std::string("no ") + missing), std::string::npos);
  }
  EXPECT_EQ(message(make_rollout(0)), "") << "an empty response has nothing to aim at";
}

TEST(Gae, WithoutValuesNamesTheCritic) {
  Options options;
  options.adv_estimator = "gae";
  const std::vector<Rollout> rollouts = {make_rewarded(2, 1)};
  try {
    compute_advantages(rollouts, options);
    FAIL() << "nothing thrown";
  } catch (const InputError& error) {
    const std::string text = error.what();
    for (const char* part : {"example.jsonl:1", "--adv-estimator gae", "--critic DIR"})
      EXPECT_NE(text.find(part), std::string::npos) << text;
  }
}

}  // namespace
}  // namespace espalier
