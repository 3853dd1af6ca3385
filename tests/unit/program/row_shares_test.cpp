// Rows sharded over cp, and waves dealt to its ranks.
#include "espalier/program/shared_runs.h"

#include <gtest/gtest.h>

#include <vector>

#include "espalier/plan/dealing.h"

namespace espalier {
namespace {

TEST(RowShares, EveryRowIsOnOneRank) {
  for (const std::int64_t ranks : {1, 2, 3, 8})
    for (const std::int64_t rows : {1, 2, 5, 16, 97}) {
      const RowShares shares(rows, ranks);
      std::vector<int> owners(static_cast<std::size_t>(rows));
      std::int64_t most = 0;
      for (std::int64_t rank = 0; rank < ranks; ++rank) {
        std::int64_t last = -1, count = 0;
        for (const RowShares::Piece& piece : shares.pieces(rank))
          for (std::int64_t row = piece.begin; row < piece.end; ++row, ++count) {
            EXPECT_GT(row, last) << "ascending";
            last = row;
            ++owners[static_cast<std::size_t>(row)];
          }
        EXPECT_EQ(count, shares.rows_of(rank));
        most = std::max(most, count);
      }
      EXPECT_EQ(owners, std::vector<int>(owners.size(), 1)) << rows << " rows, " << ranks << " ranks";
      EXPECT_EQ(most, shares.most());
    }
}

// A row sees itself and all before it.
TEST(RowShares, CausalWorkIsEven) {
  const std::int64_t rows = 4096, ranks = 8;
  const RowShares shares(rows, ranks);
  for (std::int64_t rank = 0; rank < ranks; ++rank) {
    std::int64_t pairs = 0;
    for (const RowShares::Piece& piece : shares.pieces(rank))
      for (std::int64_t row = piece.begin; row < piece.end; ++row) pairs += row + 1;
    EXPECT_EQ(pairs, rows * (rows + 1) / 2 / ranks);
  }
}

TEST(RowShares, SegmentsAreCutWherePiecesEnd) {
  RowSet set;
  set.rows = 8, set.rollouts = {3, 5};
  set.segments = {{3, 10, 15, 0, 8, 2, 0, 2}, {5, 15, 18, 5, 8, 1, 1, 2}};
  const RowSet outer = share_of(set, RowShares(8, 2), 0), inner = share_of(set, RowShares(8, 2), 1);
  EXPECT_EQ(outer.rows, 4);
  EXPECT_EQ(outer.segments, (std::vector<RowSegment>{{3, 10, 12, 0, 8, 2, 0, 2}, {5, 16, 18, 2, 8, 1, 1, 2}}));
  EXPECT_EQ(inner.segments, (std::vector<RowSegment>{
                                {3, 12, 14, 0, 8, 2, 0, 2}, {3, 14, 15, 2, 8, 2, 0, 2}, {5, 15, 16, 3, 8, 1, 1, 2}}));
}

// Rows 0-4, behind them 5-6 and 7: rank 0 has rows 0-1 and 6-7, rank 1 those between.
TEST(SharedRuns, AreCutBetweenRanksAndTheirStatesGoToThoseWhoGoOn) {
  RowSet set;
  set.rows = 8, set.rollouts = {3, 5};
  set.segments = {{3, 10, 15, 0, 8, 2, 0, 2}, {3, 15, 17, 5, 7, 1, 0, 1}, {5, 15, 16, 7, 8, 1, 1, 2}};
  const SharedRuns shared(set, RowShares(8, 2));
  ASSERT_EQ(shared.legs.size(), 3U);
  EXPECT_EQ(shared.legs[1].rank, 1);
  EXPECT_EQ(shared.legs[2].own, 2);
  const std::vector<std::vector<std::int32_t>> expected = {
      {0, 2, -1, 0}, {2, 5, 0, 1}, {5, 6, 1, 2}, {6, 7, 2, -1}, {7, 8, 1, -1}};
  std::vector<std::vector<std::int32_t>> runs;
  for (const RowRun& run : shared.runs) runs.push_back({run.begin, run.end, run.parent, run.fork});
  EXPECT_EQ(runs, expected);
  EXPECT_EQ(shared.forks, 3);
  EXPECT_EQ(shared.legs[1].first_run, 1U);
  EXPECT_EQ(shared.legs[1].last_run, 3U);
  // Rank 0 needs one copy of state 1 for its last row, and one copy of state 2 for row 6.
  ASSERT_EQ(shared.transfers.size(), 3U);
  EXPECT_EQ(shared.transfers[0].to, 1);
  EXPECT_EQ(shared.transfers[1].fork, 1);
  EXPECT_EQ(shared.transfers[2].fork, 2);
  EXPECT_EQ(shared.transfers[2].to, 0);
}

// A chain has room for the states at its cuts and for one besides.
TEST(SharedRuns, OfAChainNeedTheRoomThatIsPlanned) {
  RowSet chain;
  chain.rows = 64, chain.rollouts = {0};
  chain.segments = {{0, 0, 64, 0, 64, 1, 0, 1}};
  EXPECT_EQ(shared_states(1), 0);
  for (const std::int64_t ranks : {2, 3, 8})
    EXPECT_EQ(SharedRuns(chain, RowShares(64, ranks)).forks + 1, shared_states(ranks));
}

std::vector<PlanItem> waves(const std::vector<double>& seconds) {
  std::vector<PlanItem> items(seconds.size());
  for (std::size_t i = 0; i < seconds.size(); ++i) items[i].seconds = seconds[i];
  return items;
}

std::vector<std::int32_t> dealt(const std::vector<double>& seconds, std::int64_t ranks) {
  std::vector<PlanItem> items = waves(seconds);
  deal_waves(items, ranks);
  std::vector<std::int32_t> rank_of;
  for (const PlanItem& item : items) rank_of.push_back(item.cp_rank);
  return rank_of;
}

TEST(WaveDealing, WavesStayWholeWhereTheyBalance) {
  using Ranks = std::vector<std::int32_t>;
  constexpr std::int32_t kAll = PlanItem::kEveryRank;
  EXPECT_EQ(dealt({1, 1, 1, 1}, 2), (Ranks{0, 1, 0, 1}));
  EXPECT_EQ(dealt({3, 1, 1, 1}, 2), (Ranks{0, 1, 1, 1}));
  EXPECT_EQ(dealt({1}, 2), (Ranks{kAll}));
  EXPECT_EQ(dealt({9, 1, 1}, 2), (Ranks{kAll, 0, 1})) << "one wave longer than all others";
  EXPECT_EQ(dealt({1, 1, 1, 9, 9, 9}, 2), (Ranks{kAll, 0, 1, 0, 0, 1})) << "what ranks run together comes first";
  EXPECT_EQ(dealt({1, 1, 1}, 1), (Ranks{kAll, kAll, kAll})) << "one rank has all rows";
}

TEST(WaveDealing, TrunksAreShardedAndTheirWavesDealt) {
  std::vector<PlanItem> items(1);
  items[0].kind = ItemKind::trunk;
  items[0].below = waves({1, 1});
  deal_waves(items, 2);
  EXPECT_TRUE(is_sharded(items[0], 2));
  EXPECT_TRUE(runs_on(items[0].below[0], 0));
  EXPECT_FALSE(runs_on(items[0].below[0], 1));
  EXPECT_TRUE(runs_on(items[0].below[1], 1));
  EXPECT_FALSE(is_sharded(items[0], 1)) << "one rank has all rows";
}

}  // namespace
}  // namespace espalier
