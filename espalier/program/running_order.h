// A plan as the ordered list of its runs, for drawing it.
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
  double seconds;  // predicted; a trunk's forward is a third of its time, a quarter if its attention is recomputed
};

// At most the first `most` entries. They point into `items`.
std::vector<RunEntry> running_order(std::span<const PlanItem> items, std::size_t most);

}  // namespace espalier
