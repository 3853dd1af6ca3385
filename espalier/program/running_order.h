// A plan as the list of its runs in order, for pictures of it.
#pragma once

#include <cstddef>
#include <span>
#include <vector>

#include "espalier/program/step_plan.h"

namespace espalier {

struct RunEntry {
  char phase;  // 'A' a trunk's forward, 'B' a wave, 'C' a trunk's backward
  const PlanItem* item;
  int level;       // open trunks above
  double seconds;  // predicted; a trunk's forward is a third of its time, or a quarter if it is recomputed
};

// The first `most` entries at most. They point into `items`.
std::vector<RunEntry> running_order(std::span<const PlanItem> items, std::size_t most);

}  // namespace espalier
