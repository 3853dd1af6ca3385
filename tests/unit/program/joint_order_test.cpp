// The common order of events of ranks that run other rows than each other.
#include "espalier/program/joint_order.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cctype>
#include <map>
#include <string>
#include <vector>

namespace espalier {
namespace {

// Every rank's own events in the order, as it takes them; checks that ranks of one cp meet for what they share.
std::vector<std::string> taken(std::vector<std::string> ranks, std::int64_t cp = 1, std::int64_t first = 0) {
  std::vector<std::string> own(ranks.size());
  for (const JointEvent& next : joint_order(ranks, cp, first)) {
    std::map<std::int64_t, std::vector<std::size_t>> shared;  // by place on dp, who runs an event of all of its ranks
    for (std::size_t rank = 0; rank < ranks.size(); ++rank) {
      if (!next.own[rank]) continue;
      const char letter = ranks[rank].at(own[rank].size());
      EXPECT_EQ(static_cast<char>(next.event), std::toupper(letter));
      own[rank] += letter;
      if (letter != 'b') shared[(first + static_cast<std::int64_t>(rank)) / cp].push_back(rank);
    }
    for (const auto& [dp, here] : shared)
      for (std::size_t rank = 0; rank < ranks.size(); ++rank)
        EXPECT_EQ((first + static_cast<std::int64_t>(rank)) / cp == dp, std::ranges::count(here, rank) == 1)
            << "ranks of cp together";
  }
  return own;
}

TEST(JointOrder, HoldsTheEventsOfEveryRankInTurn) {
  const std::vector<std::vector<std::string>> runs = {
      {"ABBC", "BB"}, {"BBB", "", "AABBCC"}, {"", ""}, {"BBBB", "BB"}, {"ABCABC", "BBBB", "AAABBCCC"}};
  for (const std::vector<std::string>& ranks : runs) {
    EXPECT_EQ(taken(ranks), ranks);
    std::size_t longest = 0, all = 0;
    for (const std::string& events : ranks) longest = std::max(longest, events.size()), all += events.size();
    EXPECT_GE(joint_order(ranks).size(), longest);
    EXPECT_LE(joint_order(ranks).size(), all);
  }
}

TEST(JointOrder, OfEqualRanksIsTheirs) {
  for (const JointEvent& next : joint_order({"ABBC", "ABBC"})) EXPECT_EQ(next.own, (std::vector<std::uint8_t>{1, 1}));
  EXPECT_EQ(joint_order({"ABBC", "ABBC"}).size(), 4u);
}

// A wave that was dealt to one rank of cp must not let the other run ahead to what both run.
TEST(JointOrder, RanksOfCpComeToWhatTheyShareTogether) {
  const std::vector<std::string> two = {"AbC", "AbbbC"}, four = {"ABbC", "ABbbC", "bbb", "b"},
                                 parts = {"AbbC", "AC", "AbC"};
  EXPECT_EQ(taken(two, 2), two);
  EXPECT_EQ(taken(four, 2), four);
  EXPECT_EQ(taken(parts, 2, 1), parts) << "the first one's neighbour is elsewhere";
}

TEST(EventsOf, APlanAreThoseThatARankRuns) {
  std::vector<PlanItem> items(2);
  items[0].kind = ItemKind::trunk;
  items[0].below.resize(3);
  EXPECT_EQ(events_of(items), "ABBBCB");
  items[0].below[1].cp_rank = 0, items[0].below[2].cp_rank = 1;
  EXPECT_EQ(events_of(items, 0), "ABbCB");
  EXPECT_EQ(events_of(items, 1), "ABbCB");
  items[0].below[2].cp_rank = 0;
  EXPECT_EQ(events_of(items, 1), "ABCB");
}

TEST(JointRanks, AreThoseWhoseRowsMeetInExperts) {
  const auto of = [](const Degrees& degrees, const Place& place) {
    const RankRange range = joint_ranks(degrees, place, false);
    return std::pair(range.begin, range.count);
  };
  EXPECT_EQ(of({.tp = 4, .dp = 2, .ep = 4}, {.dp = 1}), std::pair(std::int64_t{1}, std::int64_t{1})) << "the same rows";
  EXPECT_EQ(of({.tp = 2, .dp = 4, .ep = 4}, {.dp = 3}), std::pair(std::int64_t{2}, std::int64_t{2}));
  EXPECT_EQ(of({.cp = 4, .dp = 2, .ep = 2}, {.cp = 3, .dp = 1}), std::pair(std::int64_t{6}, std::int64_t{2}));
  EXPECT_EQ(of({.cp = 4, .pp = 2, .dp = 2, .ep = 2}, {.cp = 3, .dp = 1}), std::pair(std::int64_t{4}, std::int64_t{4}))
      << "stages need whole groups of cp";
  EXPECT_EQ(of({.cp = 2, .pp = 2, .dp = 3, .ep = 3}, {.dp = 1}), std::pair(std::int64_t{0}, std::int64_t{6}));
  EXPECT_EQ(of({.cp = 2, .pp = 2, .dp = 4, .ep = 4}, {.dp = 2}), std::pair(std::int64_t{4}, std::int64_t{4}));
}

TEST(JointRanks, AreWholeGroupsOfCpWhereTheyDivideThePath) {
  const auto of = [](const Degrees& degrees, const Place& place) {
    const RankRange range = joint_ranks(degrees, place, true);
    return std::pair(range.begin, range.count);
  };
  using Pair = std::pair<std::int64_t, std::int64_t>;
  EXPECT_EQ(of({.tp = 2, .cp = 4, .dp = 2}, {.cp = 3, .dp = 1}), Pair(4, 4));
  EXPECT_EQ(of({.cp = 4, .dp = 2, .ep = 2}, {.cp = 1, .dp = 1}), Pair(4, 4)) << "experts of two ranks";
  EXPECT_EQ(of({.cp = 2, .dp = 4, .ep = 4}, {.cp = 1, .dp = 2}), Pair(4, 4)) << "and of two groups";
  EXPECT_EQ(of({.cp = 3, .dp = 2, .ep = 2}, {.cp = 1}), Pair(0, 6)) << "that lie across groups";
  EXPECT_EQ(of({.cp = 2, .dp = 3, .full = true}, {.dp = 2}), Pair(0, 6));
}

}  // namespace
}  // namespace espalier
