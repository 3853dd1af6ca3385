// A plan before its segments are written out: leaves and depths only, cheap enough to try many.
#pragma once

#include <cstdint>
#include <vector>

#include "espalier/plan/cost_model.h"
#include "espalier/plan/memory_model.h"
#include "espalier/plan/step_plan.h"
#include "espalier/plan/tree_index.h"

namespace espalier {

// The rows of leaves [leaf_begin, leaf_end) of a tree at depths [from, to); shared rows once. One leaf: one segment.
// Where `to` is given, the paths coincide down to it.
struct Block {
  std::int32_t tree = 0;
  std::int32_t leaf_begin = 0, leaf_end = 0;
  std::int32_t from = 0, to = TreeIndex::kToTheEnd;
  Work work;
};

// A wave or a trunk. With `fork` (a node of the blocks' tree) it opens with the fork's last token as a row of its own.
struct Draft {
  ItemKind kind = ItemKind::wave;
  ItemState state;
  std::int32_t fork = -1;
  bool takes_ends = false;  // counts the rollouts that end at the fork
  std::vector<Block> blocks;
  std::vector<Draft> below;
  std::int32_t path_rows = 0;
  Work work;
};

using Forest = std::vector<TreeIndex>;

// Fills block.work, draft.work.
void count_block(const Forest& forest, Block& block);
void count_draft(const Forest& forest, const EdgeIndex& edges, Draft& draft);

struct DraftCost {
  double flops = 0, seconds = 0;
  std::int32_t max_path_rows = 0;
  std::int64_t max_rows = 0;  // of one set
  std::int64_t items = 0;
};
// Adds the item and everything below it.
void add_cost(const Draft& draft, const CostModel& model, DraftCost& cost, const PathPlan& path = {});
inline const Work& work_of(const Draft& draft) { return draft.work; }
void set_trunk_states(Draft& draft, ItemState state);
void set_wave_states(Draft& draft, ItemState state);

// The plan's item with its segments.
PlanItem write_out(const Draft& draft, const Forest& forest, const EdgeIndex& edges, const CostModel& model,
                   const PathPlan& path);

}  // namespace espalier
