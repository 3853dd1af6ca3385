// Programs of all ranks of layouts and plans drawn from seeds, run against each other without tensors: a deadlock is a
// failing test. The program's source is compiled with deliberate faults (program_faults.py), each of which is noticed.
// A failing seed is printed.
#include "espalier/program/program.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <ostream>
#include <random>
#include <set>
#include <string>
#include <tuple>
#include <vector>

#include "espalier/plan/dealing.h"
#include "espalier/program/row_shares.h"
#include "tests/mutation/faults.h"
#include "tests/support/program_text.h"

namespace espalier {
namespace testing {

void PrintTo(const Fault& fault, std::ostream* out) { *out << fault.meaning; }

}  // namespace testing
namespace {

class Draws {
 public:
  explicit Draws(std::uint64_t seed) : random_(seed) {}
  std::int64_t below(std::int64_t n) { return static_cast<std::int64_t>(random_() % static_cast<std::uint64_t>(n)); }
  std::int64_t one_of(std::initializer_list<std::int64_t> choices) {
    return choices.begin()[below(static_cast<std::int64_t>(choices.size()))];
  }

 private:
  std::mt19937_64 random_;
};

std::vector<PlanItem> drawn_items(Draws& draws, int depth) {
  std::vector<PlanItem> items(static_cast<std::size_t>(draws.below(depth == 0 ? 5 : 4)) + (depth == 0 ? 0 : 1));
  for (PlanItem& item : items) {
    item.seconds = 1 + static_cast<double>(draws.below(9));
    item.set.rows = static_cast<std::int32_t>(1 + draws.below(9));
    if (depth == 3 || draws.below(3) > 0) continue;
    item.kind = ItemKind::trunk;
    item.below = drawn_items(draws, depth + 1);
  }
  return items;
}

// A layout, a plan for each place on dp, and all that ranks need to know of each other.
struct Layout {
  Degrees degrees;
  bool gradients = true;
  std::vector<std::vector<PlanItem>> items;  // by dp
  std::vector<std::uint8_t> divides;         // its path, by dp

  Place place(std::int64_t rank) const { return place_of(rank, degrees); }
  RankRange together(std::int64_t rank) const {
    return joint_ranks(degrees, place(rank), std::ranges::count(divides, 1) > 0);
  }
  std::int64_t replica(std::int64_t rank) const { return place(rank).dp * degrees.cp + place(rank).cp; }

  Program program(std::int64_t rank) const {
    const RankRange range = together(rank);
    const Place here = place(rank);
    std::vector<std::string> events;
    for (std::int64_t other = range.begin; other < range.begin + range.count; ++other)
      events.push_back(events_of(items[static_cast<std::size_t>(other / degrees.cp)], other % degrees.cp));
    const auto dp = static_cast<std::size_t>(here.dp);
    return program_of(items[dp], joint_order(std::move(events), degrees.cp, range.begin),
                      {static_cast<std::size_t>(replica(rank) - range.begin), here.cp, degrees.cp,
                       waves_in_flight(degrees, here, gradients), divides[dp] != 0});
  }
};

Layout drawn_layout(std::uint64_t seed) {
  Draws draws(seed);
  Layout out;
  Degrees& d = out.degrees;
  do {
    d = {.tp = draws.one_of({1, 1, 2}),
         .cp = draws.one_of({1, 2, 3}),
         .pp = draws.one_of({1, 2, 3, 4}),
         .dp = draws.one_of({1, 2, 3}),
         .ep = draws.one_of({1, 1, 2, 4})};
  } while (d.ranks() / d.pp % d.ep != 0 || d.ep % d.tp != 0);
  d.full = d.dp * d.cp > 1 && draws.below(3) == 0;
  out.gradients = draws.below(5) > 0;
  for (std::int64_t dp = 0; dp < d.dp; ++dp) {
    out.items.push_back(drawn_items(draws, 0));
    deal_waves(out.items.back(), d.cp);
    out.divides.push_back(d.cp > 1 && draws.below(3) == 0);
  }
  return out;
}

std::int64_t count_own(const std::vector<PlanItem>& items, std::int64_t cp_rank) {
  std::int64_t count = 0;
  for (const PlanItem& item : items) count += (runs_on(item, cp_rank) ? 1 : 0) + count_own(item.below, cp_rank);
  return count;
}

// The fault of one rank's program by itself; empty: none.
std::string fault_of(const Layout& layout, std::int64_t rank, const Program& program) {
  const Place place = layout.place(rank);
  const std::vector<PlanItem>& items = layout.items[static_cast<std::size_t>(place.dp)];
  const std::int64_t most = waves_in_flight(layout.degrees, place, layout.gradients);
  std::vector<std::size_t> open, in_flight;
  std::int64_t forwards = 0;
  std::set<const PlanItem*> seen;
  for (std::size_t at = 0; at < program.size(); ++at) {
    const Step& step = program[at];
    const bool forward = step.pass == Pass::forward;
    if (step.own != nullptr && step.own->kind != step.kind) return "another kind of item";
    if (forward && step.own != nullptr) {
      ++forwards;
      if (!seen.insert(step.own).second) return "an item twice";
      if (!runs_on(*step.own, place.cp)) return "an item of another rank";
      const std::vector<PlanItem>& around = open.empty() ? items : program[open.back()].own->below;
      if (step.own < around.data() || step.own >= around.data() + around.size()) return "below another trunk";
    }
    if (step.kind == ItemKind::wave && forward) {
      for (const std::size_t other : in_flight)
        if (program[other].region == step.region) return "a region used twice";
      in_flight.push_back(at);
      if (std::ssize(in_flight) > most || step.region < 0 || step.region >= most) return "too many waves in flight";
    } else if (step.kind == ItemKind::wave) {
      if (in_flight.empty()) return "no wave to end";
      const Step& first = program[in_flight.front()];
      if (first.own != step.own || first.region != step.region || first.on_path != step.on_path)
        return "waves end in another order than they began";
      in_flight.erase(in_flight.begin());
    } else if (!in_flight.empty()) {
      return "a trunk's step while waves are in flight";
    } else if (step.own != nullptr && forward) {
      open.push_back(at);
    } else if (step.own != nullptr) {
      if (open.empty() || program[open.back()].own != step.own) return "trunks close in another order";
      std::int64_t joined = 0, last = -1;
      for (std::size_t i = open.back() + 1; i < at; ++i) {
        const Step& below = program[i];
        joined += below.own == nullptr && below.on_path && below.pass == Pass::backward ? 1 : 0;
        const bool ends = below.kind == ItemKind::wave ? below.pass == Pass::forward : below.pass == Pass::backward;
        const std::vector<PlanItem>& all = step.own->below;
        if (ends && below.own >= all.data() && below.own < all.data() + all.size()) last = static_cast<std::int64_t>(i);
      }
      if (program[open.back()].reports != count_own(step.own->below, place.cp) + joined)
        return "another number of reports to a trunk";
      if (last >= 0 && !program[static_cast<std::size_t>(last)].last_below) return "the last one below is not said";
      open.pop_back();
    }
  }
  if (!open.empty() || !in_flight.empty()) return "something does not end";
  return forwards == count_own(items, place.cp) ? "" : "items are left out";
}

// All ranks at once. A rank ends its next step when those that it goes through events with are at the same one, when
// ranks of cp that divide the item are at it, and when the neighbour among the stages has sent what it needs.
class Meeting {
 public:
  explicit Meeting(const Layout& layout) : layout_(layout), at_(static_cast<std::size_t>(layout.degrees.ranks())) {
    for (std::int64_t rank = 0; rank < layout.degrees.ranks(); ++rank) programs_.push_back(layout.program(rank));
  }

  // Empty: all ranks came to their ends, and each program is sound.
  std::string fault() {
    for (std::int64_t rank = 0; rank < layout_.degrees.ranks(); ++rank)
      if (const std::string what = fault_of(layout_, rank, program(rank)); !what.empty())
        return what + ", rank " + std::to_string(rank) + ": " + text_of_program(program(rank));
    for (bool moved = true; moved;) {
      moved = false;
      std::vector<std::int64_t> ready;
      for (std::int64_t rank = 0; rank < layout_.degrees.ranks(); ++rank)
        if (next(rank) != nullptr && meets_all(rank)) ready.push_back(rank);
      for (const std::int64_t rank : ready) end_step(rank), moved = true;
    }
    std::string out;
    for (std::int64_t rank = 0; rank < layout_.degrees.ranks(); ++rank)
      if (next(rank) != nullptr)
        out += "rank " + std::to_string(rank) + " waits at step " +
               std::to_string(at_[static_cast<std::size_t>(rank)]) + " of " + text_of_program(program(rank)) + "\n";
    return out;
  }

 private:
  const Program& program(std::int64_t rank) const { return programs_[static_cast<std::size_t>(rank)]; }
  const Step* next(std::int64_t rank) const {
    const std::size_t at = at_[static_cast<std::size_t>(rank)];
    return at < program(rank).size() ? &program(rank)[at] : nullptr;
  }
  std::int64_t rank_of(std::int64_t replica, const Place& like) const {
    const Degrees& d = layout_.degrees;
    return ((replica / d.cp * d.pp + like.pp) * d.cp + replica % d.cp) * d.tp + like.tp;
  }
  std::int64_t stage_of(std::int64_t rank, std::int64_t pp) const {
    const Degrees& d = layout_.degrees;
    return rank + (pp - layout_.place(rank).pp) * d.cp * d.tp;
  }

  bool has_received(std::int64_t rank, const Step& step) const {
    const std::int64_t pp = layout_.place(rank).pp + (step.pass == Pass::forward ? -1 : 1);
    if (step.own == nullptr || pp < 0 || pp >= layout_.degrees.pp) return true;
    if (step.pass == Pass::backward && !layout_.gradients) return true;
    // The neighbour's sends arrive in its order: this one's number among them is that of its own receives.
    const auto from = sent_.find({stage_of(rank, pp), step.pass});
    const auto here = sent_.find({rank, step.pass});
    const std::size_t number = here == sent_.end() ? 0 : here->second.size();
    return from != sent_.end() && from->second.size() > number && from->second[number] == step.own;
  }

  bool meets_all(std::int64_t rank) const {
    const Step& step = *next(rank);
    const Place place = layout_.place(rank);
    const RankRange range = layout_.together(rank);
    for (std::int64_t replica = range.begin; replica < range.begin + range.count; ++replica) {
      const std::int64_t other = rank_of(replica, place);
      const Step* its = next(other);
      if (its == nullptr || its->pass != step.pass || its->kind != step.kind || !has_received(other, *its))
        return false;
      if (other / (layout_.degrees.ranks() / layout_.degrees.dp) == place.dp && its->on_path != step.on_path)
        return false;
    }
    if (step.own == nullptr || !is_sharded(*step.own, layout_.degrees.cp)) return true;
    for (std::int64_t cp = 0; cp < layout_.degrees.cp; ++cp) {
      const std::int64_t other = rank_of(place.dp * layout_.degrees.cp + cp, place);
      const Step* its = next(other);
      if (its == nullptr || its->own != step.own || its->pass != step.pass || !has_received(other, *its)) return false;
    }
    return has_received(rank, step);
  }

  void end_step(std::int64_t rank) {
    const Step& step = *next(rank);
    if (step.own != nullptr) sent_[{rank, step.pass}].push_back(step.own);
    ++at_[static_cast<std::size_t>(rank)];
  }

  const Layout& layout_;
  std::vector<Program> programs_;
  std::vector<std::size_t> at_;
  std::map<std::pair<std::int64_t, Pass>, std::vector<const PlanItem*>> sent_;
};

std::string fault_of_seed(std::uint64_t seed) {
  const Layout layout = drawn_layout(seed);
  const std::string what = Meeting(layout).fault();
  return what.empty() ? "" : "seed " + std::to_string(seed) + ", " + text_of_degrees(layout.degrees) + ": " + what;
}

TEST(Program, RanksOfDrawnLayoutsMeetAtEveryStep) {
  for (std::uint64_t seed = 1; seed <= 400; ++seed) EXPECT_EQ(fault_of_seed(seed), "");
}

std::vector<PlanItem> trunk_with_waves(std::size_t waves) {
  std::vector<PlanItem> items(1);
  items[0].kind = ItemKind::trunk;
  items[0].below.resize(waves);
  return items;
}

TEST(Program, HasAsManyWavesInFlightAsAStageMay) {
  const std::vector<PlanItem> items = trunk_with_waves(3);
  EXPECT_EQ(text_of_program(program_of(items, 1)), "A B0 b0 B0 b0 B0 b0 C");
  EXPECT_EQ(text_of_program(program_of(items, 2)), "A B0 B1 b0 B0 b1 b0 C");
  EXPECT_EQ(text_of_program(program_of(items, 4)), "A B0 B1 B2 b0 b1 b2 C");
  EXPECT_EQ(waves_in_flight({.pp = 4}, {.pp = 1}, true), 3);
  EXPECT_EQ(waves_in_flight({.pp = 4}, {.pp = 1}, false), 1);
}

TEST(Program, SaysWhatATrunkWaitsFor) {
  std::vector<PlanItem> items = trunk_with_waves(2);
  items[0].below[0] = trunk_with_waves(2)[0];
  const Program program = program_of(items, 1);
  EXPECT_EQ(text_of_program(program), "A A B0 b0 B0 b0 C B0 b0 C");
  EXPECT_EQ(program[0].reports, 4);
  EXPECT_EQ(program[1].reports, 2);
  std::vector<std::size_t> last;
  for (std::size_t at = 0; at < program.size(); ++at)
    if (program[at].last_below) last.push_back(at);
  EXPECT_EQ(last, (std::vector<std::size_t>{4, 7}));
}

// Two ranks of cp that divide the path: each joins the wave of the other, and its trunk waits for that part, too.
TEST(Program, JoinsWhatNeighboursRun) {
  std::vector<PlanItem> items = trunk_with_waves(2);
  items[0].set.rows = 5, items[0].below[0].set.rows = 3, items[0].below[1].set.rows = 4;
  items[0].below[0].cp_rank = 0, items[0].below[1].cp_rank = 1;
  const auto order = joint_order({events_of(items, 0), events_of(items, 1)}, 2);
  ASSERT_EQ(order.size(), 3u) << "both waves at once";
  items[0].below[1].cp_rank = 0;
  const auto one_runs = joint_order({events_of(items, 0), events_of(items, 1)}, 2);
  const Program own = program_of(items, one_runs, {.member = 0, .cp_rank = 0, .cp = 2, .path_sharded = true}),
                joins = program_of(items, one_runs, {.member = 1, .cp_rank = 1, .cp = 2, .path_sharded = true});
  EXPECT_EQ(text_of_program(own), "A B0 b0 B0 b0 C");
  EXPECT_EQ(text_of_program(joins), "A (B0) (b0) (B0) (b0) C");
  EXPECT_EQ(own.front().reports, 2);
  EXPECT_EQ(joins.front().reports, 2);
  EXPECT_TRUE(joins[1].on_path);
  EXPECT_EQ(own[2].rows_behind, 8);
  EXPECT_EQ(joins.front().rows_behind, 12) << "the waves of others are behind it";
  const Program whole = program_of(items, one_runs, {.member = 1, .cp_rank = 1, .cp = 2});
  EXPECT_EQ(whole.front().reports, 0) << "a path that is not divided";
}

class ProgramFaults : public ::testing::TestWithParam<testing::Fault> {};

TEST_P(ProgramFaults, IsNoticed) {
  const testing::SwitchedOn on(GetParam());
  std::int64_t noticed = 0;
  for (std::uint64_t seed = 1; seed <= 50; ++seed) noticed += fault_of_seed(seed).empty() ? 0 : 1;
  EXPECT_GT(noticed, 0);
  EXPECT_GT(on.times(), 0);
}

INSTANTIATE_TEST_SUITE_P(All, ProgramFaults, ::testing::ValuesIn(testing::all_faults()),
                         [](const auto& one) { return one.param.name; });

}  // namespace
}  // namespace espalier
