// In place of the product family x plan x budget x path x loss x rollouts: rows in which every two values stand
// together (tests/support/covering.h), another choice of rows every day. A failing row is printed with its day.
#include <gtest/gtest.h>

#include <iterator>
#include <string>
#include <vector>

#include "espalier/shape/path_leaves.h"
#include "tests/equivalence/against_autograd.h"
#include "tests/equivalence/factors.h"
#include "tests/support/covering.h"

namespace espalier::testing {
namespace {

const std::vector<std::string>& families() {
  static const std::vector<std::string> all = [] {
    std::vector<std::string> names(std::begin(kVariants), std::end(kVariants));
    for (const std::string& row : families_of_table()) names.push_back(row);
    return names;
  }();
  return all;
}

const std::vector<Plan> kPlans = all_plans({0});
const std::vector<std::int64_t> kBudgets = {0, 1, 2, 7, 20};
const std::vector<std::string> kPaths = {"auto", "keep", "offload", "latents", "latents-offload"};
const std::vector<std::string> kShares = {"auto", "prompt", "off"};
constexpr int kCritic = std::size(kLosses), kSeeds = 3;
enum Factor { family, plan, budget, path, loss, share, seed, temperature };

const std::vector<std::vector<int>>& rows() {
  static const std::vector<std::vector<int>> all = [] {
    std::vector<bool> has_latents;
    for (const std::string& name : families()) has_latents.push_back(may_carry_latents(tiny_shape(name)));
    const auto size = [](const auto& values) { return static_cast<int>(values.size()); };
    Factors factors{
        {size(families()), size(kPlans), size(kBudgets), size(kPaths), kCritic + 1, size(kShares), kSeeds, 2}};
    factors.may_meet = [has_latents](int f, int a, int g, int b) {
      return !(f == family && g == path && kPaths[b].starts_with("latents")) || has_latents[a];
    };
    return covering_rows(factors, seed_of_day());
  }();
  return all;
}

Case case_of(const std::vector<int>& row) {
  Case c;
  c.family = families()[row[family]];
  c.rollouts = ragged_rollouts();
  if (row[temperature] == 1) c.rollouts.temperature_low = 0.7, c.rollouts.temperature_high = 1.3;
  c.seed = 1 + row[seed];
  c = row[loss] == kCritic ? as_critic(c) : c;
  if (row[loss] != kCritic) set_loss(c, kLosses[row[loss]]);
  Plan chosen = kPlans[row[plan]];
  chosen.budget = kBudgets[row[budget]];
  c = with(c, chosen);
  c.options.path_state = kPaths[row[path]];
  c.options.share = kShares[row[share]];
  return c;
}

class Pairs : public ::testing::TestWithParam<std::string> {};

TEST_P(Pairs, GiveTheGradientOfAutograd) {
  int ran = 0;
  for (const std::vector<int>& row : rows()) {
    if (families()[row[family]] != GetParam()) continue;
    const Case c = case_of(row);
    SCOPED_TRACE(c.family + ", " + kPlans[row[plan]].name + " -> " + std::to_string(kBudgets[row[budget]]) + ", path " +
                 kPaths[row[path]] + ", share " + kShares[row[share]] + ", loss " + std::to_string(row[loss]) +
                 ", seed " + std::to_string(c.seed) + ", temperature " + std::to_string(row[temperature]));
    expect_as_autograd(c, run_oracle(c));
    ++ran;
  }
  EXPECT_GE(ran, kCritic + 1);  // each loss at least
}

INSTANTIATE_TEST_SUITE_P(Models, Pairs, ::testing::ValuesIn(families()),
                         [](const auto& info) { return name_of_family(info.param); });

}  // namespace
}  // namespace espalier::testing
