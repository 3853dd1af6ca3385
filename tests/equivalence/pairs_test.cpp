// In place of the product family x plan x budget x path x loss x rollouts: rows in which every two values stand
// together (tests/support/covering.h), another choice of rows every day. A failing row is printed with its day.
//
// In Pairs a value of the first factor is a group of families with the same kinds of parts, which take turns: every
// family runs, and every kind of parts meets everything. In WholeArray, for `make sweep`, every family does.
#include <gtest/gtest.h>

#include <iterator>
#include <map>
#include <string>
#include <vector>

#include "espalier/shape/path_leaves.h"
#include "tests/equivalence/against_autograd.h"
#include "tests/equivalence/factors.h"
#include "tests/support/covering.h"

namespace espalier::testing {
namespace {

const std::vector<Plan> kPlans = all_plans({0});
const std::vector<std::int64_t> kBudgets = {0, 1, 2, 7, 20};
const std::vector<std::string> kPaths = {"auto", "keep", "offload", "latents", "latents-offload"};
const std::vector<std::string> kShares = {"auto", "prompt", "off"};
constexpr int kCritic = std::size(kLosses), kSeeds = 3;
enum Factor { family, plan, budget, path, loss, share, seed, temperature };

// The rows of each family. Every group meets each loss, so that a group of so many families has a row for each.
using RowsOfFamily = std::map<std::string, std::vector<std::vector<int>>>;
RowsOfFamily rows_of(const std::vector<std::vector<std::string>>& groups) {
  std::vector<bool> has_latents;
  for (const auto& group : groups) has_latents.push_back(may_carry_latents(tiny_shape(group.front())));
  const auto size = [](const auto& values) { return static_cast<int>(values.size()); };
  Factors factors{{size(groups), size(kPlans), size(kBudgets), size(kPaths), kCritic + 1, size(kShares), kSeeds, 2}};
  factors.may_meet = [has_latents](int f, int a, int g, int b) {
    return !(f == family && g == path && kPaths[b].starts_with("latents")) || has_latents[a];
  };
  RowsOfFamily out;
  std::vector<std::size_t> turn(groups.size());
  for (const std::vector<int>& row : covering_rows(factors, seed_of_day())) {
    const auto& group = groups[row[family]];
    out[group[turn[row[family]]++ % group.size()]].push_back(row);
  }
  return out;
}

Case case_of(const std::string& of_family, const std::vector<int>& row) {
  Case c;
  c.family = of_family;
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

void expect_rows(const RowsOfFamily& rows, const std::string& of_family, int least) {
  const auto found = rows.find(of_family);
  ASSERT_NE(found, rows.end());
  EXPECT_GE(std::ssize(found->second), least);
  for (const std::vector<int>& row : found->second) {
    const Case c = case_of(of_family, row);
    SCOPED_TRACE(c.family + ", " + kPlans[row[plan]].name + " -> " + std::to_string(kBudgets[row[budget]]) + ", path " +
                 kPaths[row[path]] + ", share " + kShares[row[share]] + ", loss " + std::to_string(row[loss]) +
                 ", seed " + std::to_string(c.seed) + ", temperature " + std::to_string(row[temperature]));
    expect_as_autograd(c, run_oracle(c));
  }
}

class Pairs : public ::testing::TestWithParam<std::string> {};
TEST_P(Pairs, GiveTheGradientOfAutograd) {
  static const RowsOfFamily rows = rows_of(groups_of_families(kCritic + 1));
  expect_rows(rows, GetParam(), 1);
}
INSTANTIATE_TEST_SUITE_P(Models, Pairs, ::testing::ValuesIn(all_families()),
                         [](const auto& info) { return name_of_family(info.param); });

class WholeArray : public ::testing::TestWithParam<std::string> {};
TEST_P(WholeArray, GivesTheGradientOfAutograd) {
  static const RowsOfFamily rows = rows_of(groups_of_families(1));
  expect_rows(rows, GetParam(), kCritic + 1);  // each loss at least
}
INSTANTIATE_TEST_SUITE_P(Models, WholeArray, ::testing::ValuesIn(all_families()),
                         [](const auto& info) { return name_of_family(info.param); });

}  // namespace
}  // namespace espalier::testing
