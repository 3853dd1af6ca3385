// An item of a plan before its segments are written out: leaves and depths only, cheap enough to try many.
#pragma once

#include <cstdint>
#include <vector>

#include "espalier/program/item_state.h"
#include "espalier/program/step_plan.h"
#include "espalier/program/work.h"

namespace espalier {

inline constexpr std::int32_t kToTheEnd = INT32_MAX;  // stands for the end of any path

// The rows of leaves [leaf_begin, leaf_end) of a tree at depths [from, to), shared rows once. The rows of a single leaf
// are one segment. If `to` is given, the paths coincide down to it.
struct Block {
  std::int32_t tree = 0;
  std::int32_t leaf_begin = 0, leaf_end = 0;
  std::int32_t from = 0, to = kToTheEnd;
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

inline const Work& work_of(const Draft& draft) { return draft.work; }

}  // namespace espalier
