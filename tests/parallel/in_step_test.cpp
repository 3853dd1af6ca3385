// The common order of passes of ranks that run other rows than each other.
#include "espalier/phase/in_step.h"

#include <gtest/gtest.h>

#include <string>
#include <vector>

namespace espalier {
namespace {

// How many passes of a rank the order holds, taken as InStep takes them.
std::size_t matched(const std::string& passes, const std::string& order) {
  std::size_t next = 0;
  for (const char pass : order)
    if (next < passes.size() && passes[next] == pass) ++next;
  return next;
}

TEST(CommonOrder, HoldsThePassesOfEveryRankInTurn) {
  const std::vector<std::vector<std::string>> runs = {
      {"ffbfbb", "fbfb"}, {"fbfbfb", "", "ffffbbbb"}, {"", ""}, {"ffff", "ff"}, {"ffbb", "fbfbfbfb", "fffbbb"}};
  for (const std::vector<std::string>& ranks : runs) {
    const std::string order = common_order(ranks);
    std::size_t longest = 0, all = 0;
    for (const std::string& passes : ranks) {
      EXPECT_EQ(matched(passes, order), passes.size()) << passes << " in " << order;
      longest = std::max(longest, passes.size()), all += passes.size();
    }
    EXPECT_GE(order.size(), longest);
    EXPECT_LE(order.size(), all);
  }
}

TEST(CommonOrder, OfEqualRanksIsTheirs) { EXPECT_EQ(common_order({"ffbfbb", "ffbfbb"}), "ffbfbb"); }

TEST(PassesOf, APlanAreItsForwardsAndBackwards) {
  StepPlan plan;
  plan.items.resize(2);
  plan.items[0].kind = ItemKind::trunk;
  plan.items[0].below.resize(2);
  EXPECT_EQ(passes_of(plan, true), "ffbfbbfb");
  EXPECT_EQ(passes_of(plan, false), "ffff");
}

}  // namespace
}  // namespace espalier
