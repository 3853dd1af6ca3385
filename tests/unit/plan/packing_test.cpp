#include "espalier/plan/packing.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <random>

namespace espalier {
namespace {

TEST(Packing, KeepsEveryBlockExactlyOnceAndNoBinAboveItsCapacity) {
  for (unsigned seed = 0; seed < 200; ++seed) {
    SCOPED_TRACE(seed);
    std::mt19937 random(seed);
    const std::int64_t capacity = 1 + random() % 100;
    std::vector<std::int64_t> rows(random() % 60);
    for (auto& r : rows) r = 1 + random() % capacity;
    std::vector<int> seen(rows.size());
    for (const auto& bin : pack_blocks(rows, capacity)) {
      std::int64_t sum = 0;
      for (std::int32_t block : bin) sum += rows[block], ++seen[block];
      EXPECT_LE(sum, capacity);
      EXPECT_TRUE(std::is_sorted(bin.begin(), bin.end()));
      EXPECT_FALSE(bin.empty());
    }
    EXPECT_TRUE(std::all_of(seen.begin(), seen.end(), [](int n) { return n == 1; }));
  }
}

// First-fit decreasing needs at most 11/9 of the best number of bins, plus 6/9; no packing needs fewer than the sum.
TEST(Packing, FillsBinsAsFirstFitDecreasingMust) {
  for (unsigned seed = 0; seed < 100; ++seed) {
    SCOPED_TRACE(seed);
    std::mt19937 random(seed);
    // Blocks that fill bins exactly: every bin of 1000 is cut at random places.
    std::vector<std::int64_t> rows;
    for (int bin = 0; bin < 20; ++bin) {
      std::int64_t left = 1000;
      while (left > 0) {
        const std::int64_t part = std::min<std::int64_t>(left, 50 + random() % 500);
        rows.push_back(part);
        left -= part;
      }
    }
    EXPECT_LE(pack_blocks(rows, 1000).size(), static_cast<std::size_t>(20 * 11 / 9.0 + 6 / 9.0));
  }
}

TEST(Packing, MakesBinsOfEqualSizeWhereThatTakesNoMore) {
  const std::vector<std::int64_t> rows(12, 100);  // 1000 would hold ten and leave two
  const auto bins = pack_blocks(rows, 1000);
  ASSERT_EQ(bins.size(), 2u);
  EXPECT_EQ(bins[0].size(), 6u);
}

TEST(Packing, GivesABlockAboveTheCapacityABinOfItsOwn) {
  const std::vector<std::int64_t> rows = {5, 50, 5};
  const auto bins = pack_blocks(rows, 10);
  ASSERT_EQ(bins.size(), 2u);
  EXPECT_EQ(bins[0], (std::vector<std::int32_t>{0, 2}));
  EXPECT_EQ(bins[1], (std::vector<std::int32_t>{1}));
  EXPECT_TRUE(pack_blocks({}, 10).empty());
  EXPECT_TRUE(pack_blocks({}, 10, 4).empty());
}

// Ranks that share the bins have as many each.
TEST(Packing, AMultipleOfBins) {
  const std::vector<std::int64_t> rows(8, 5);
  EXPECT_EQ(pack_blocks(rows, 100).size(), 1u);
  EXPECT_EQ(pack_blocks(rows, 100, 4).size(), 4u);
  EXPECT_EQ(pack_blocks(rows, 15, 2).size(), 4u) << "three would do";
  EXPECT_EQ(pack_blocks(std::vector<std::int64_t>{5, 5}, 100, 4).size(), 2u) << "not more than there are blocks";
  EXPECT_EQ(pack_blocks(std::vector<std::int64_t>{9, 1, 1}, 100, 2).size(), 2u);
}

}  // namespace
}  // namespace espalier
