// Runs grow, come and go at random; their rows must follow them, and attention must see each run alone.
#include "espalier/generate/row_packing.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <map>

#include "espalier/base/random.h"

namespace espalier {
namespace {

// A buffer whose rows are numbers, moved as the packing says.
struct Buffer {
  explicit Buffer(std::int64_t rows) : row(static_cast<std::size_t>(rows), -1) {}
  void apply(const RowPacking::Move& move) {
    const auto from = row.begin() + move.from;
    const std::vector<std::int64_t> copy(from, from + move.count);
    std::copy(copy.begin(), copy.end(), row.begin() + move.to);
  }
  std::vector<std::int64_t> row;
};

TEST(RowPacking, RowsFollowTheirRunsWhateverHappens) {
  for (std::uint64_t seed = 0; seed < 40; ++seed) {
    Random random(seed);
    const std::int64_t runs = random.integer(1, 9), longest = random.integer(1, 120);
    RowPacking packing(runs, longest);
    Buffer buffer(packing.capacity());
    std::map<std::int64_t, std::vector<std::int64_t>> truth;  // owner -> its rows
    std::vector<RowPacking::Move> moves;
    for (std::int64_t step = 0; step < 300; ++step) {
      while (static_cast<std::int64_t>(truth.size()) < runs && random.chance(0.4)) {
        packing.add(step * 100 + static_cast<std::int64_t>(truth.size()));
        truth[step * 100 + static_cast<std::int64_t>(truth.size())] = {};
      }
      std::vector<std::int64_t> more;  // some wait, some get several rows
      for (std::size_t i = 0; i < packing.runs().size(); ++i) {
        more.push_back(std::min(longest - packing.runs()[i].count, random.chance(0.8) ? 1 : random.integer(0, 40)));
        packing.set_more(i, more.back());
      }
      packing.make_room(moves);
      for (const auto& move : moves) buffer.apply(move);
      packing.grow();
      std::int64_t end = 0;
      for (const RowPacking::Run& run : packing.runs()) {
        ASSERT_GE(run.begin, end) << "seed " << seed;
        ASSERT_LE(run.begin + run.count, run.end);
        end = run.end;
        ASSERT_LE(end, packing.capacity());
        auto& rows = truth.at(run.owner);
        for (std::int32_t i = run.count - run.more; i < run.count; ++i) {
          rows.push_back(step * 100'000 + run.owner * 100 + i);
          buffer.row[static_cast<std::size_t>(run.begin + i)] = rows.back();
        }
        ASSERT_EQ(run.count, static_cast<std::int64_t>(rows.size()));
        for (std::int32_t i = 0; i < run.count; ++i) {
          ASSERT_EQ(buffer.row[static_cast<std::size_t>(run.begin + i)], rows[static_cast<std::size_t>(i)])
              << "seed " << seed << ", step " << step;
          ASSERT_EQ(packing.subtree_end()[static_cast<std::size_t>(run.begin + i)], run.end);
        }
      }
      ASSERT_LE(packing.rows(), packing.touched());
      for (auto run = truth.begin(); run != truth.end();) {
        const bool ends = static_cast<std::int64_t>(run->second.size()) == longest || random.chance(0.03);
        if (ends) packing.remove(run->first);
        run = ends ? truth.erase(run) : std::next(run);
      }
    }
  }
}

// 16 rows of room each, so rows without use stay below 16 a run, and moves are rare.
TEST(RowPacking, RunsStandCloseTogetherAndMoveSeldom) {
  RowPacking packing(8, 1000);
  std::vector<RowPacking::Move> moves;
  std::int64_t moved = 0;
  for (std::int64_t run = 0; run < 8; ++run) packing.add(run);
  for (std::int64_t step = 1; step <= 200; ++step) {
    packing.make_room(moves);
    moved += static_cast<std::int64_t>(moves.size());
    packing.grow();
    ASSERT_LE(packing.rows(), 8 * (step + 16));
  }
  EXPECT_LE(moved, 8 * 200 / 16);
}

}  // namespace
}  // namespace espalier
