#include "tests/support/covering.h"

#include <gtest/gtest.h>

#include <set>
#include <tuple>

namespace espalier::testing {
namespace {

using Rows = std::vector<std::vector<int>>;

std::set<std::tuple<int, int, int, int>> pairs_of(const Rows& rows) {
  std::set<std::tuple<int, int, int, int>> pairs;
  for (const std::vector<int>& row : rows)
    for (int g = 1; g < static_cast<int>(row.size()); ++g)
      for (int f = 0; f < g; ++f) pairs.insert({f, row[f], g, row[g]});
  return pairs;
}

TEST(CoveringRows, HaveEveryPairInFewRows) {
  const std::vector<int> sizes = {30, 7, 5, 9, 2};
  for (std::uint64_t seed = 1; seed < 6; ++seed) {
    const Rows rows = covering_rows({sizes}, seed);
    std::size_t wanted = 0;
    for (std::size_t g = 1; g < sizes.size(); ++g)
      for (std::size_t f = 0; f < g; ++f) wanted += static_cast<std::size_t>(sizes[f] * sizes[g]);
    EXPECT_EQ(pairs_of(rows).size(), wanted) << "seed " << seed;
    EXPECT_GE(rows.size(), 270u);
    EXPECT_LE(rows.size(), 320u) << "18,900 rows are the product";
  }
}

TEST(CoveringRows, KeepApartWhatMayNotMeet) {
  const auto may_meet = [](int f, int a, int g, int b) { return !(f == 0 && g == 1 && a == 0 && b != 2); };
  const Rows rows = covering_rows({{3, 4, 5}, may_meet}, 1);
  for (const std::vector<int>& row : rows) EXPECT_TRUE(row[0] != 0 || row[1] == 2);
  EXPECT_EQ(pairs_of(rows).size(), 12u + 15u + 20u - 3u);
}

TEST(CoveringRows, LeaveOutAPairThatAThirdFactorForbids) {
  // 0 of the first and 0 of the second may meet, but no value of the third meets both.
  const auto may_meet = [](int f, int a, int g, int b) { return g != 2 || a != 0 || b == f; };
  const Rows rows = covering_rows({{2, 2, 2}, may_meet}, 1);
  EXPECT_FALSE(pairs_of(rows).contains({0, 0, 1, 0}));
  EXPECT_TRUE(pairs_of(rows).contains({0, 0, 1, 1}));
}

TEST(CoveringRows, HaveAPairThatOneRowOfManyAllows) {
  // 0 and 0 stand together only where all of four further factors are 29.
  const auto may_meet = [](int f, int a, int g, int b) { return f > 1 || g < 2 || a != 0 || b == 29; };
  Factors factors{{2, 2, 30, 30, 30, 30}, may_meet};
  EXPECT_TRUE(pairs_of(covering_rows(factors, 1)).contains({0, 0, 1, 0}));
}

TEST(CoveringRows, AreOthersOfAnotherSeed) {
  EXPECT_EQ(covering_rows({{4, 4, 4}}, 1), covering_rows({{4, 4, 4}}, 1));
  EXPECT_NE(covering_rows({{4, 4, 4}}, 1), covering_rows({{4, 4, 4}}, 2));
}

}  // namespace
}  // namespace espalier::testing
