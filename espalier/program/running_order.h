// A plan as the list of what runs, one after the other: for pictures of it.
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
  double seconds;  // predicted; of a trunk's passes the forward is one in three, or in four where it is recomputed
};

// Points into `items`. At most `most` entries: the first ones.
std::vector<RunEntry> running_order(std::span<const PlanItem> items, std::size_t most);

}  // namespace espalier
