// The waves of a step dealt to the ranks of cp.
//
// Trunks are divided row by row (plan/row_shares.h). Waves are dealt whole where that balances: given the path they do
// not depend on each other, so none of their keys and values travel. A wave that is too heavy for that is divided.
#pragma once

#include <cstdint>
#include <vector>

#include "espalier/plan/step_plan.h"

namespace espalier {

// Sets PlanItem::cp_rank of all waves. Waves of one trunk are dealt by predicted seconds, the heaviest first, each to
// the rank that has least; as many of the heaviest are divided as make the slowest rank fastest, and these come first.
void deal_waves(std::vector<PlanItem>& items, std::int64_t ranks);

}  // namespace espalier
