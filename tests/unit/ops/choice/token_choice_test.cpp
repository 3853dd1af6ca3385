// The tokens that may be drawn, and how often each is.
#include "espalier/ops/cpu/token_choice.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <numeric>

#include "espalier/base/random.h"
#include "espalier/ops/cpu/choice_kernels.h"

namespace espalier {
namespace {

std::vector<double> some_logits(std::int64_t vocabulary, std::uint64_t seed, double deviation) {
  Random random(seed);
  std::vector<double> logits(static_cast<std::size_t>(vocabulary));
  for (double& z : logits) z = std::round(deviation * random.normal() * 8) / 8;  // ties occur
  return logits;
}

template <class A>
TokenChoice choose(const std::vector<A>& logits, const ChoiceRule& rule, double uniform) {
  ChoiceScratch scratch;
  const HeadRowSums sums =
      compute_row_sums(logits.data(), static_cast<std::int64_t>(logits.size()), rule.inverse_temperature());
  return choose_token(std::span<const A>(logits), sums, rule, uniform, scratch);
}

std::vector<double> softmax(const std::vector<double>& logits, double temperature) {
  std::vector<double> p;
  const double top = *std::max_element(logits.begin(), logits.end());
  for (const double z : logits) p.push_back(std::exp((z - top) / temperature));
  const double total = std::accumulate(p.begin(), p.end(), 0.0);
  for (double& x : p) x /= total;
  return p;
}

// All ids by falling probability, then rising id; cut as the rule says. Sorted by id.
std::vector<std::int32_t> expected_support(const std::vector<double>& logits, const ChoiceRule& rule) {
  const std::vector<double> p = softmax(logits, rule.temperature);
  std::vector<std::int32_t> order(logits.size());
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [&](int a, int b) { return logits[a] > logits[b]; });
  if (rule.top_k >= 1 && rule.top_k < static_cast<std::int64_t>(order.size())) order.resize(rule.top_k);
  double all = 0, reached = 0;
  for (const std::int32_t id : order) all += p[id];
  std::size_t kept = 0;
  while (kept < order.size() && (rule.top_p == 1 || reached < rule.top_p * all)) reached += p[order[kept++]];
  order.resize(kept);
  std::sort(order.begin(), order.end());
  return order;
}

TEST(TokenChoice, KeepsExactlyTheTokensOfTheRule) {
  for (std::uint64_t seed = 0; seed < 60; ++seed) {
    const auto logits = some_logits(seed % 3 ? 40 : 700, seed, seed % 2 ? 3 : 0.7);
    for (const std::int64_t top_k : {0, -1, 1, 2, 7, 39, 5000})
      for (const double top_p : {1.0, 0.9999, 0.9, 0.313, 1e-6}) {
        const ChoiceRule rule{0.7, top_k, top_p};
        std::vector<std::int32_t> kept;
        const auto p = softmax(logits, rule.temperature);
        compute_kept(std::span<const double>(logits), std::span<const double>(p), rule, kept);
        const auto wanted = expected_support(logits, rule);
        if (kept.empty())
          EXPECT_EQ(wanted.size(), logits.size());
        else
          EXPECT_EQ(kept, wanted) << "seed " << seed << ", top_k " << top_k << ", top_p " << top_p;
      }
  }
}

// The weights equal the C library's within the 2 units in the last place that base/simd.h promises.
TEST(TokenChoice, WeightsAndTheirSums) {
  for (const std::int64_t vocabulary : {1, 3, 511, 512, 513, 2000}) {
    const auto logits = some_logits(vocabulary, 4, 60);
    const std::vector<float> narrow(logits.begin(), logits.end());  // eighths: exact
    const double top = *std::max_element(logits.begin(), logits.end());
    std::vector<double> weight(logits.size()), again(logits.size()), run((logits.size() + 511) / 512), run_again = run;
    compute_weights(logits.data(), vocabulary, top, 1.25, weight.data(), run.data());
    compute_weights(narrow.data(), vocabulary, top, 1.25, again.data(), run_again.data());
    EXPECT_EQ(weight, again);
    EXPECT_EQ(run, run_again);
    for (std::size_t r = 0; r < run.size(); ++r) {
      double total = 0;
      for (std::size_t v = 512 * r; v < std::min(logits.size(), 512 * (r + 1)); ++v) {
        const double wanted = std::exp((logits[v] - top) * 1.25);
        EXPECT_NEAR(weight[v], wanted, 4 * 0x1p-52 * wanted) << "token " << v << " of " << vocabulary;
        total += wanted;
      }
      EXPECT_NEAR(run[r], total, 1e-13 * total);
    }
  }
}

// A vocabulary of several runs, in float and double: the token at every uniform number is that of one long sum.
TEST(TokenChoice, RunsOfTokensAreWalkedLikeTheWholeRow) {
  const auto logits = some_logits(3000, 6, 2);
  const std::vector<float> narrow(logits.begin(), logits.end());
  const auto p = softmax(logits, 0.9);
  for (int i = 0; i < 500; ++i) {
    const double uniform = (i + 0.37) / 500;
    std::size_t wanted = 0;
    for (double reached = p[0]; reached <= uniform; reached += p[++wanted]) continue;
    EXPECT_EQ(choose(logits, {0.9, 0, 1}, uniform).token, static_cast<std::int32_t>(wanted));
    EXPECT_EQ(choose(narrow, {0.9, 0, 1}, uniform).token, static_cast<std::int32_t>(wanted));
  }
}

// Uniform numbers on an even grid of N draw every kept token N p times, give or take the two ends of its stretch.
TEST(TokenChoice, DrawsEveryTokenAsOftenAsItsProbability) {
  for (const ChoiceRule& rule :
       {ChoiceRule{1, 0, 1}, ChoiceRule{0.5, 6, 1}, ChoiceRule{1.3, 0, 0.8}, ChoiceRule{2, 9, 0.6}}) {
    const auto logits = some_logits(30, 8, 1.5);
    const auto support = expected_support(logits, rule);
    const auto p = softmax(logits, rule.temperature);
    double all = 0;
    for (const std::int32_t id : support) all += p[id];
    constexpr int kDraws = 20000;
    std::map<std::int32_t, int> drawn;
    for (int i = 0; i < kDraws; ++i) ++drawn[choose(logits, rule, (i + 0.5) / kDraws).token];
    EXPECT_EQ(drawn.size(), support.size());
    for (const std::int32_t id : support) EXPECT_NEAR(drawn[id], kDraws * p[id] / all, 1.01) << "token " << id;
  }
}

TEST(TokenChoice, LogprobsAreOverTheWholeVocabulary) {
  const auto logits = some_logits(64, 3, 2);
  const ChoiceRule rule{0.8, 3, 0.5};
  const auto p = softmax(logits, 0.8);
  for (const double uniform : {0.0, 0.4, 0.999}) {
    const TokenChoice choice = choose(logits, rule, uniform);
    EXPECT_NEAR(choice.logprob, std::log(p[choice.token]), 1e-13);
  }
}

TEST(TokenChoice, GreedyTakesTheLowestOfEqualIds) {
  const std::vector<double> logits = {1, 3, -2, 3, 3};
  const TokenChoice choice = choose(logits, {0, 0, 1}, 0.99);
  EXPECT_EQ(choice.token, 1);
  EXPECT_NEAR(choice.logprob, std::log(softmax(logits, 1)[1]), 1e-14);
  EXPECT_EQ(choose(logits, {1, 1, 1}, 0.99).token, 1);  // so does top-k
}

TEST(TokenChoice, TheEndsOfTheUniformRangeGiveTokensThatCanBeDrawn) {
  const double below = -std::numeric_limits<double>::infinity();
  const std::vector<double> logits = {below, 0, 1, below};
  EXPECT_EQ(choose(logits, {1, 0, 1}, 0).token, 1);
  EXPECT_EQ(choose(logits, {1, 0, 1}, 1 - 0x1p-53).token, 2);
}

TEST(TokenChoice, TinyTemperaturesAreGreedyAndFinite) {
  const auto logits = some_logits(50, 2, 30);
  std::vector<double> unique = logits;
  unique[17] = 400;
  for (const double uniform : {0.0, 0.5, 0.99}) {
    const TokenChoice choice = choose(unique, {1e-6, 0, 1}, uniform);
    EXPECT_EQ(choice.token, 17);
    EXPECT_EQ(choice.logprob, 0);
  }
}

}  // namespace
}  // namespace espalier
