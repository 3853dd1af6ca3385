// Ranks that run other rows than each other, as those of dp do, still meet in every layer where experts are spread over
// them (ep), weights divided (--shard full) or the path over ranks of cp (--path-state divide): they go through the
// events of their plans in one common order, and a rank without rows of its own for an event joins it.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "espalier/parallel/degrees.h"
#include "espalier/program/schedule.h"

namespace espalier {

// The events of a rank of cp, in order, as letters; a wave dealt to it alone is 'b', all others are run by every
// rank of its cp at the same time.
std::string events_of(const std::vector<PlanItem>& items, std::int64_t cp_rank = 0);

struct JointEvent {
  Event event;
  std::vector<std::uint8_t> own;  // by rank: it has such an event of its own here; else it joins without rows
};

// The shortest order that a simple rule finds in which every rank's events are contained in theirs: the next event is
// that of the rank with most to do, the lowest among equals; all who are about to run such an event do. Ranks of one cp
// come to what they run together at the same place. `events`: of neighbours among dp x cp, counted with cp fastest,
// beginning with number `first`.
std::vector<JointEvent> joint_order(std::vector<std::string> events, std::int64_t cp = 1, std::int64_t first = 0);

// Which of the ranks of dp x cp go through events together with the one at `place`: itself alone where all ranks of ep
// have the same rows, all where they divide the weights. Where any divides its path whole groups of cp go together, and
// with experts where stages of pp have several waves in flight, for ranks of one cp must have the same ones.
struct RankRange {
  std::int64_t begin = 0, count = 1;
};
RankRange joint_ranks(const Degrees& degrees, const Place& place, bool path_divided);

}  // namespace espalier
