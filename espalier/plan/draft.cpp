// Work, cost and segments of drafts.
#include "espalier/plan/draft.h"

#include <algorithm>

#include "espalier/base/error.h"

namespace espalier {
namespace {

std::int32_t fork_depth(const Draft& draft, const Forest& forest) {
  return forest[draft.blocks[0].tree].node(draft.fork).end - 1;
}

// Writes the segments of one block from `row` on and returns the row after it. `first`: where its rollouts stand.
std::int32_t write_block(const Block& block, const TreeIndex& tree, std::int32_t row, std::int32_t first, RowSet& set) {
  const std::vector<std::int32_t>& order = tree.tree().leaf_order;
  if (block.leaf_end - block.leaf_begin == 1) {
    const std::int32_t end = std::min(block.to, tree.leaf_length(block.leaf_begin));
    if (end <= block.from) return row;
    const std::int32_t after = row + end - block.from;
    set.segments.push_back({order[block.leaf_begin], block.from, end, row, after, 1, first, first + 1});
    return after;
  }
  struct Open {
    std::int32_t node;
    std::size_t segment;
  };
  std::vector<Open> open;
  const auto close = [&] {
    set.segments[open.back().segment].subtree_end = row;
    open.pop_back();
  };
  tree.for_each_node(block.leaf_begin, block.leaf_end, block.from, block.to,
                     [&](std::int32_t node, std::int32_t low, std::int32_t high, std::int32_t begin, std::int32_t end) {
                       while (!open.empty() && open.back().node != tree.node(node).parent) close();
                       open.push_back({node, set.segments.size()});
                       set.segments.push_back({order[low], begin, end, row, 0, high - low,
                                               first + low - block.leaf_begin, first + high - block.leaf_begin});
                       row += end - begin;
                     });
  while (!open.empty()) close();
  return row;
}

// Rollouts whose last edge leaves a row of the set: depths from the fork's row, or the block's first, to its end.
std::vector<std::int32_t> finished_in(const Draft& draft, const Forest& forest, const EdgeIndex& edges) {
  std::vector<std::int32_t> finished;
  const std::int32_t boundary = draft.fork < 0 ? -1 : fork_depth(draft, forest);
  for (const Block& block : draft.blocks)
    for (std::int32_t rollout : forest[block.tree].rollouts(block.leaf_begin, block.leaf_end)) {
      const std::int32_t last = edges.last_row(rollout);
      if (last >= 0 && ((last >= block.from && last < block.to) || last == boundary)) finished.push_back(rollout);
    }
  return finished;
}

double seconds_of(const Draft& draft, const CostModel& model, const PathPlan& path) {
  const std::int64_t own = draft.kind == ItemKind::trunk ? draft.work.rows : 0;
  return model.seconds(draft.work, draft.state, model.bytes().path_traffic(draft.path_rows, own, path));
}

}  // namespace

void count_block(const Forest& forest, Block& block) {
  block.work = forest[block.tree].work_of_leaves(block.leaf_begin, block.leaf_end, block.from, block.to);
}

void count_draft(const Forest& forest, const EdgeIndex& edges, Draft& draft) {
  draft.work = {};
  for (const Block& block : draft.blocks) draft.work += block.work;
  if (draft.fork < 0) return;
  const std::int32_t depth = fork_depth(draft, forest);
  draft.work += work_of_depths(depth, depth + 1, false, edges.window());
  std::vector<std::int32_t> through;
  for (const Block& block : draft.blocks) {
    const auto rollouts = forest[block.tree].rollouts(block.leaf_begin, block.leaf_end);
    through.insert(through.end(), rollouts.begin(), rollouts.end());
  }
  edges.add_outputs(through, depth, depth + 1, draft.work);
  draft.work.forks += draft.blocks.size() > 1 ? 1 : 0;
}

void add_cost(const Draft& draft, const CostModel& model, DraftCost& cost, const PathPlan& path,
              std::int64_t window_rows) {
  ++cost.items;
  cost.flops += model.flops(draft.work, draft.state);
  cost.seconds += seconds_of(draft, model, path);
  cost.max_rows = std::max(cost.max_rows, draft.work.rows);
  if (draft.kind == ItemKind::wave) return;
  const std::int64_t end = draft.path_rows + draft.work.rows;
  window_rows += window_rows_kept(draft.path_rows, end, model.bytes().window());
  cost.max_path.all = std::max(cost.max_path.all, end);
  cost.max_path.window = std::max(cost.max_path.window, window_rows);
  for (const Draft& item : draft.below) add_cost(item, model, cost, path, window_rows);
}

void set_trunk_states(Draft& draft, ItemState state) {
  if (draft.kind == ItemKind::trunk) draft.state = state;
  for (Draft& item : draft.below) set_trunk_states(item, state);
}

void set_wave_states(Draft& draft, ItemState state) {
  if (draft.kind == ItemKind::wave) draft.state = state;
  for (Draft& item : draft.below) set_wave_states(item, state);
}

PlanItem write_out(const Draft& draft, const Forest& forest, const EdgeIndex& edges, const CostModel& model,
                   const PathPlan& path) {
  PlanItem item;
  item.kind = draft.kind;
  item.state = draft.state;
  item.path_rows = draft.path_rows;
  item.flops = model.flops(draft.work, item.state);
  item.seconds = seconds_of(draft, model, path);
  item.finished = finished_in(draft, forest, edges);
  RowSet& set = item.set;
  set.rows = static_cast<std::int32_t>(draft.work.rows);
  set.outputs = static_cast<std::int32_t>(draft.work.outputs);
  set.pairs = draft.work.pairs;
  set.output_pairs = draft.work.output_pairs;
  set.window_pairs = draft.work.window_pairs;
  set.window_output_pairs = draft.work.window_output_pairs;
  set.forks = draft.work.forks;

  std::int32_t row = 0;
  if (draft.fork >= 0) {
    if (draft.takes_ends) set.rollouts = forest[draft.blocks[0].tree].node(draft.fork).ends_here;
    const std::int32_t depth = fork_depth(draft, forest);
    set.segments.push_back({0, depth, depth + 1, 0, set.rows, 0, 0, 0});
    row = 1;
  }
  for (const Block& block : draft.blocks) {
    const std::int32_t first = static_cast<std::int32_t>(set.rollouts.size());
    const auto rollouts = forest[block.tree].rollouts(block.leaf_begin, block.leaf_end);
    set.rollouts.insert(set.rollouts.end(), rollouts.begin(), rollouts.end());
    row = write_block(block, forest[block.tree], row, first, set);
  }
  ESPALIER_INTERNAL_EQ(row, set.rows);
  if (draft.fork >= 0) {
    RowSegment& segment = set.segments.front();
    segment.rollout = set.rollouts.front();
    segment.last = segment.multiplicity = static_cast<std::int32_t>(set.rollouts.size());
  }
  item.below.reserve(draft.below.size());
  for (const Draft& below : draft.below) item.below.push_back(write_out(below, forest, edges, model, path));
  return item;
}

}  // namespace espalier
