// A plan before its segments are written out: leaves and depths only, cheap enough to try many.
#pragma once

#include <cstdint>
#include <vector>

#include "espalier/forecast/cost_model.h"
#include "espalier/forecast/memory_model.h"
#include "espalier/plan/tree_index.h"
#include "espalier/program/draft_item.h"
#include "espalier/program/step_plan.h"

namespace espalier {

using Forest = std::vector<TreeIndex>;

// Fills block.work, draft.work.
void count_block(const Forest& forest, Block& block);
void count_draft(const Forest& forest, const EdgeIndex& edges, Draft& draft);

struct DraftCost {
  double flops = 0, seconds = 0;
  PathRows max_path;          // the most rows open at once
  std::int64_t max_rows = 0;  // the largest number of rows in one set
  std::int64_t items = 0;
};
// Adds the item and everything below it. `window_rows`: the rows of the trunks above that layers with a window keep.
void add_cost(const Draft& draft, const CostModel& model, DraftCost& cost, const PathPlan& path = {},
              std::int64_t window_rows = 0);
void set_trunk_states(Draft& draft, ItemState state);
void set_wave_states(Draft& draft, ItemState state);

// The plan's item with its segments.
PlanItem write_out(const Draft& draft, const Forest& forest, const EdgeIndex& edges, const CostModel& model,
                   const PathPlan& path);

}  // namespace espalier
