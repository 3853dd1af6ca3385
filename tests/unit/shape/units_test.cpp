// Sharded units: every element is kept once, and is where the buffers say.
#include "espalier/shape/units.h"

#include <gtest/gtest.h>

#include <cstdlib>
#include <map>
#include <tuple>
#include <vector>

#include "espalier/model/parameters.h"
#include "tests/unit/plan/shapes.h"

namespace espalier {
namespace {

// A rank of a unit, and the element that it begins with; of experts, which ones.
using Key = std::tuple<std::int64_t, std::int64_t, std::int64_t, bool, std::int64_t>;

TEST(Units, KeepEveryElementOnceOverTheRanksThatDivideThem) {
  ModelShape shape = testing::qwen3_30b_a3b();
  shape.layer.resize(4);
  for (Degrees degrees : {Degrees{.dp = 3},
                          {.cp = 2, .dp = 2},
                          {.tp = 2, .dp = 3},
                          {.pp = 3, .dp = 2},
                          {.dp = 4, .ep = 2},
                          {.tp = 2, .dp = 2, .ep = 4},
                          {.dp = 4, .ep = 4}}) {
    degrees.full = true;
    std::map<Key, std::int64_t> kept;  // elements, by place on tp, pp and ep, and unit
    for (std::int64_t rank = 0; rank < degrees.ranks(); ++rank) {
      const Place place = place_of(rank, degrees);
      const LocalShape local(shape, degrees, place);
      const Units units = units_of(local);
      std::int64_t end = 0, flat = 0;
      for (const Unit& unit : units.all) {
        EXPECT_EQ(unit.begin, end) << "units follow each other";
        EXPECT_EQ(unit.place, flat);
        end += unit.count, flat += unit.part();
        EXPECT_LE(unit.room + (unit.sharded() ? unit.whole() : 0), units.rooms);
        EXPECT_LE(unit.sum + (unit.sharded() ? unit.part() : 0), units.sums);
        for (const Unit& other : units.all) {
          const bool beside = std::abs(unit.what - other.what) <= 1 && unit.what >= 0 && other.what >= 0;
          if (!beside || &unit == &other || !unit.sharded() || !other.sharded()) continue;
          EXPECT_TRUE(unit.room + unit.whole() <= other.room || other.room + other.whole() <= unit.room)
              << name_of(unit) << " and " << name_of(other) << " are used at the same time";
        }
        const Axis axis = unit.experts ? Axis::expert_replicas : Axis::replicas;
        const std::vector<int> holders = ranks_along(axis, rank, degrees);
        ASSERT_EQ(static_cast<std::int64_t>(holders.size()), unit.ranks);
        EXPECT_EQ(holders[static_cast<std::size_t>(unit.rank)], rank);
        kept[{place.pp, unit.experts ? 0 : place.tp, unit.what, unit.experts, unit.experts ? place.ep : 0}] +=
            unit.kept(unit.begin, unit.count, unit.rank).count;
      }
      EXPECT_EQ(end, local.parameters());
      EXPECT_EQ(flat, units.kept);
    }
    for (std::int64_t rank = 0; rank < degrees.ranks(); ++rank) {
      const Place place = place_of(rank, degrees);
      for (const Unit& unit : units_of(LocalShape(shape, degrees, place)).all)
        EXPECT_EQ((kept[{place.pp, unit.experts ? 0 : place.tp, unit.what, unit.experts, unit.experts ? place.ep : 0}]),
                  unit.count)
            << text_of_degrees(degrees) << ", unit " << unit.what;
    }
  }
}

// Runs of neighbours cover what is kept, and nothing of the padding behind a part.
TEST(Units, RunsOfParametersAreWhatIsKept) {
  const ModelShape shape = testing::llama_3_8b();
  for (std::int64_t dp : {3, 7}) {
    std::int64_t sum = 0;
    for (std::int64_t rank = 0; rank < dp; ++rank) {
      const Degrees degrees{.dp = dp, .full = true};
      const ParameterTable table(LocalShape(shape, degrees, place_of(rank, degrees)));
      std::int64_t end = 0;
      for_each_run(
          table, [](const Parameter& parameter) { return parameter.shape.size() >= 2; },
          [&](std::int64_t begin, std::int64_t count, bool) {
            EXPECT_GE(begin, end);
            end = begin + count, sum += count;
          });
      EXPECT_LE(end, table.kept_size());
    }
    EXPECT_EQ(sum, shape.parameters());
  }
}

}  // namespace
}  // namespace espalier
