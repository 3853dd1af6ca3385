// In place of the product family x layout x plan x budget x path x loss x share x rollouts: rows in which every two
// values stand together (tests/support/covering.h), another choice of rows every day. A family that a layout refuses
// does not meet it: axes_test.cpp says that it is refused by name. A failing row is printed with its day.
#include <gtest/gtest.h>

#include <iterator>
#include <string>
#include <vector>

#include "espalier/base/error.h"
#include "espalier/shape/local_shape.h"
#include "espalier/shape/path_leaves.h"
#include "tests/equivalence/factors.h"
#include "tests/parallel/layouts.h"
#include "tests/support/covering.h"

namespace espalier::testing {
namespace {

std::vector<std::string> families() {
  std::vector<std::string> names(std::begin(kVariants), std::end(kVariants));
  for (const std::string& row : families_of_table()) names.push_back(row);
  return names;
}

const std::vector<std::string> kFamilies = families();
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

const std::vector<std::vector<int>>& rows() {
  static const std::vector<std::vector<int>> all = [] {
    std::vector<ModelShape> shapes;
    for (const std::string& name : kFamilies) shapes.push_back(tiny_shape(name));
    std::vector<std::vector<bool>> served;
    for (const ModelShape& shape : shapes) {
      served.emplace_back();
      for (const Degrees& degrees : kLayouts) served.back().push_back(serves(shape, degrees));
    }
    const auto size = [](const auto& values) { return static_cast<int>(values.size()); };
    Factors factors{{size(kFamilies), size(kLayouts), size(kPlans), size(kBudgets), size(kPaths), kCritic + 1,
                     size(kShares), kSeeds}};
    factors.may_meet = [&](int f, int a, int g, int b) {
      if (f == family && g == layout) return static_cast<bool>(served[a][b]);
      return !(f == family && g == path && kPaths[b].starts_with("latents")) || may_carry_latents(shapes[a]);
    };
    return covering_rows(factors, seed_of_day());
  }();
  return all;
}

class LayoutPairs : public ::testing::TestWithParam<std::string> {};

TEST_P(LayoutPairs, GiveTheGradientOfOneProcess) {
  int ran = 0;
  for (const std::vector<int>& row : rows()) {
    if (kFamilies[row[family]] != GetParam()) continue;
    Case c = ragged(GetParam());
    c.seed = 1 + row[seed];
    c = row[loss] == kCritic ? as_critic(c) : c;
    if (row[loss] != kCritic) set_loss(c, kLosses[row[loss]]);
    Plan chosen = kPlans[row[plan]];
    chosen.budget = kBudgets[row[budget]];
    c = with(c, chosen);
    c.options.path_state = kPaths[row[path]];
    c.options.share = kShares[row[share]];
    SCOPED_TRACE(text_of(GetParam(), ", ", text_of_degrees(kLayouts[row[layout]]), ", ", chosen.name, " -> ",
                         chosen.budget, ", path ", kPaths[row[path]], ", share ", kShares[row[share]], ", loss ",
                         row[loss], ", seed ", c.seed));
    EXPECT_NO_THROW(expect_as_one_process(c, kLayouts[row[layout]], run_case(c)));
    ++ran;
  }
  EXPECT_GE(ran, kCritic + 1);  // each loss at least
}

INSTANTIATE_TEST_SUITE_P(Models, LayoutPairs, ::testing::ValuesIn(kFamilies),
                         [](const auto& info) { return name_of_family(info.param); });

}  // namespace
}  // namespace espalier::testing
