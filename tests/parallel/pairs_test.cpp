// In place of the product family x layout x plan x budget x path x loss x share x rollouts: rows in which every two
// values stand together (tests/support/covering.h), another choice of rows every day. A family that a layout refuses
// does not meet it: axes_test.cpp says that it is refused by name. A failing row is printed with its day. The first
// factor's values are groups of families (LayoutPairs) or families (WholeLayoutArray), as in
// equivalence/pairs_test.cpp.
#include <gtest/gtest.h>

#include <iterator>
#include <map>
#include <string>
#include <vector>

#include "espalier/base/error.h"
#include "espalier/mixers/attention/shape.h"
#include "espalier/shape/local_shape.h"
#include "espalier/shape/path_leaves.h"
#include "tests/equivalence/factors.h"
#include "tests/parallel/layouts.h"
#include "tests/support/covering.h"

namespace espalier::testing {
namespace {

const std::vector<Degrees> kLayouts = {{.tp = 2},
                                       {.tp = 4},
                                       {.cp = 2},
                                       {.cp = 3},
                                       {.pp = 3},
                                       {.dp = 2},
                                       {.dp = 3, .full = true},
                                       {.dp = 2, .ep = 2},
                                       {.tp = 2, .ep = 2},
                                       {.cp = 2, .pp = 2},
                                       {.cp = 2, .full = true},
                                       {.tp = 2, .pp = 2, .dp = 2}};
const std::vector<Plan> kPlans = all_plans({0});
const std::vector<std::int64_t> kBudgets = {0, 1, 7};
const std::vector<std::string> kPaths = {"auto", "offload", "divide", "latents", "latents-offload", "latents-divide"};
const std::vector<std::string> kShares = {"auto", "prompt", "off"};
constexpr int kCritic = std::size(kLosses), kSeeds = 3;
enum Factor { family, layout, plan, budget, path, loss, share, seed };

bool serves(const ModelShape& shape, const Degrees& degrees) {
  if (degrees.ep > 1 && shape.experts % degrees.ep != 0) return false;
  if (degrees.ep > 1 && shape.experts == 0) return false;
  try {
    const LocalShape checked(shape, degrees, {});
    return true;
  } catch (const OptionError&) {
    return false;
  }
}

std::vector<bool> served_layouts(const std::string& of_family) {
  const ModelShape shape = tiny_shape(of_family);
  std::vector<bool> out;
  for (const Degrees& degrees : kLayouts) out.push_back(serves(shape, degrees));
  return out;
}

// The layouts that serve the family, its heads of keys and values, and where matrices are divided.
std::string cuts_of(const std::string& of_family) {
  std::string out = " ";
  for (const bool served : served_layouts(of_family)) out += served ? '1' : '0';
  for (const LayerShape& layer : tiny_shape(of_family).layer)
    if (const auto* const attention = dynamic_cast<const Attention*>(layer.mixer.get()))
      return out + text_of(" ", attention->shape.kv_heads);
  return out;
}

// The rows of each family. Every group meets each loss, so that a group of so many families has a row for each.
using RowsOfFamily = std::map<std::string, std::vector<std::vector<int>>>;
RowsOfFamily rows_of(const std::vector<std::vector<std::string>>& groups) {
  std::vector<std::vector<bool>> served;
  std::vector<bool> has_latents;
  for (const auto& group : groups) {
    served.push_back(served_layouts(group.front()));
    has_latents.push_back(may_carry_latents(tiny_shape(group.front())));
  }
  const auto size = [](const auto& values) { return static_cast<int>(values.size()); };
  Factors factors{
      {size(groups), size(kLayouts), size(kPlans), size(kBudgets), size(kPaths), kCritic + 1, size(kShares), kSeeds}};
  factors.may_meet = [&](int f, int a, int g, int b) {
    if (f == family && g == layout) return static_cast<bool>(served[a][b]);
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

void expect_rows(const RowsOfFamily& rows, const std::string& of_family, int least) {
  const auto found = rows.find(of_family);
  ASSERT_NE(found, rows.end());
  EXPECT_GE(std::ssize(found->second), least);
  for (const std::vector<int>& row : found->second) {
    Case c = ragged(of_family);
    c.seed = 1 + row[seed];
    c = row[loss] == kCritic ? as_critic(c) : c;
    if (row[loss] != kCritic) set_loss(c, kLosses[row[loss]]);
    Plan chosen = kPlans[row[plan]];
    chosen.budget = kBudgets[row[budget]];
    c = with(c, chosen);
    c.options.path_state = kPaths[row[path]];
    c.options.share = kShares[row[share]];
    SCOPED_TRACE(text_of(of_family, ", ", text_of_degrees(kLayouts[row[layout]]), ", ", chosen.name, " -> ",
                         chosen.budget, ", path ", kPaths[row[path]], ", share ", kShares[row[share]], ", loss ",
                         row[loss], ", seed ", c.seed));
    EXPECT_NO_THROW(expect_as_one_process(c, kLayouts[row[layout]], run_case(c)));
  }
}

class LayoutPairs : public ::testing::TestWithParam<std::string> {};
TEST_P(LayoutPairs, GiveTheGradientOfOneProcess) {
  static const RowsOfFamily rows = rows_of(groups_of_families(kCritic + 1, cuts_of));
  expect_rows(rows, GetParam(), 1);
}
INSTANTIATE_TEST_SUITE_P(Models, LayoutPairs, ::testing::ValuesIn(all_families()),
                         [](const auto& info) { return name_of_family(info.param); });

class WholeLayoutArray : public ::testing::TestWithParam<std::string> {};
TEST_P(WholeLayoutArray, GivesTheGradientOfOneProcess) {
  static const RowsOfFamily rows = rows_of(groups_of_families(1));
  expect_rows(rows, GetParam(), kCritic + 1);  // each loss at least
}
INSTANTIATE_TEST_SUITE_P(Models, WholeLayoutArray, ::testing::ValuesIn(all_families()),
                         [](const auto& info) { return name_of_family(info.param); });

}  // namespace
}  // namespace espalier::testing
