// The ranks that share an axis, against sets written out by hand.
#include "espalier/parallel/degrees.h"

#include <gtest/gtest.h>

#include <set>

#include "espalier/base/error.h"

namespace espalier {
namespace {

using Ranks = std::vector<int>;

TEST(Degrees, TpIsFastestThenCpPpDp) {
  const Degrees d{.tp = 2, .cp = 2, .pp = 2, .dp = 2};
  EXPECT_EQ(d.ranks(), 16);
  EXPECT_EQ(ranks_along(Axis::tp, 5, d), (Ranks{4, 5}));
  EXPECT_EQ(ranks_along(Axis::cp, 5, d), (Ranks{5, 7}));
  EXPECT_EQ(ranks_along(Axis::pp, 5, d), (Ranks{1, 5}));
  EXPECT_EQ(ranks_along(Axis::dp, 5, d), (Ranks{5, 13}));
  EXPECT_EQ(ranks_along(Axis::replicas, 5, d), (Ranks{5, 7, 13, 15}));
  EXPECT_EQ(ranks_along(Axis::world, 5, d).size(), 16u);
}

TEST(Degrees, ExpertsAreSpreadOverNeighboursOfOneStage) {
  const Degrees d{.tp = 2, .pp = 2, .dp = 2, .ep = 2};
  EXPECT_EQ(ranks_along(Axis::ep, 0, d), (Ranks{0, 1}));
  EXPECT_EQ(ranks_along(Axis::ep, 7, d), (Ranks{6, 7}));
  EXPECT_EQ(ranks_along(Axis::expert_replicas, 0, d), (Ranks{0, 4}));
  const Degrees wide{.tp = 2, .pp = 2, .dp = 2, .ep = 4};
  EXPECT_EQ(ranks_along(Axis::ep, 0, wide), (Ranks{0, 1, 4, 5}));
  EXPECT_EQ(ranks_along(Axis::expert_replicas, 4, wide), (Ranks{4}));
}

// A rank that counted itself into another set than its neighbours do would wait for them for ever.
TEST(Degrees, EveryAxisPartitionsTheWorldTheSameWayOnAllRanks) {
  for (const Degrees& d : {Degrees{.tp = 2, .cp = 3, .pp = 2, .dp = 2, .ep = 4}, Degrees{.dp = 5, .ep = 5},
                           Degrees{.tp = 3, .cp = 2, .ep = 2}})
    for (const Axis axis : {Axis::tp, Axis::cp, Axis::pp, Axis::dp, Axis::ep, Axis::replicas, Axis::expert_replicas})
      for (int rank = 0; rank < d.ranks(); ++rank)
        for (const int other : ranks_along(axis, rank, d))
          EXPECT_EQ(ranks_along(axis, other, d), ranks_along(axis, rank, d)) << text_of_degrees(d) << " rank " << rank;
}

TEST(Degrees, ExpertsThatDoNotDivideAStageAreRefused) {
  EXPECT_NO_THROW(check_degrees({.tp = 2, .dp = 3, .ep = 6}));
  EXPECT_THROW(check_degrees({.tp = 2, .dp = 3, .ep = 4}), OptionError);
  EXPECT_EQ(text_of_degrees({.tp = 2, .dp = 3}), "tp 2, dp 3");
  EXPECT_EQ(text_of_degrees({}), "one rank");
}

}  // namespace
}  // namespace espalier
