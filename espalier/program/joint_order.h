// The common order of events for ranks that run different rows, such as the ranks of dp. They meet in every layer under
// ep, under --shard full and under --path-state divide. So they go through the events of their plans in one order, and
// a rank without rows for an event joins it.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "espalier/parallel/degrees.h"
#include "espalier/program/schedule.h"

namespace espalier {

// The events of a rank of cp, in order, as letters. A wave dealt to it alone is 'b'; every other event is run by all
// ranks of its cp group at the same time.
std::string events_of(const std::vector<PlanItem>& items, std::int64_t cp_rank = 0);

struct JointEvent {
  Event event;
  std::vector<std::uint8_t> own;  // by rank: true if it has its own event here; otherwise it joins without rows
};

// An order that contains every rank's events in sequence, kept short by a simple rule: the next event is the one of the
// rank with the most events left, the lowest among equals; every rank whose next event is of this kind runs it. Ranks
// of one cp group reach their common events at the same place. `events`: of neighbours in dp x cp, counted with cp
// fastest, beginning with number `first`.
std::vector<JointEvent> joint_order(std::vector<std::string> events, std::int64_t cp = 1, std::int64_t first = 0);

// The ranks of dp x cp that go through events together with the rank at `place`: only itself if all ranks of ep have
// the same rows, all ranks if weights are sharded. Whole groups of cp go together if a path is sharded over cp, and
// also with ep if stages of pp have several waves in flight, because ranks of one cp group must have the same waves.
struct RankRange {
  std::int64_t begin = 0, count = 1;
};
RankRange joint_ranks(const Degrees& degrees, const Place& place, bool path_sharded);

}  // namespace espalier
