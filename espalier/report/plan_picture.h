// A step's plan in a few hundred numbers: enough to draw its prefix trees and its schedule long after it ran.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "espalier/program/step_plan.h"
#include "espalier/rollout/rollout.h"

namespace espalier {

// The "plan" of docs/run_folder.md: {"trees": [...], "tree_count", "nodes": [...], "schedule": [...],
// "entry_count", "rows", "seconds"}. `rollouts` are the plan's. At most 200 nodes and 300 entries of the
// schedule, the first ones of each; the counts say how many there are. Trees are drawn as the tokens have them, also
// where the options forbid sharing. Time: O(tokens).
Json plan_picture(const StepPlan& plan, std::span<const Rollout> rollouts);

// --- The same, read back ---

struct PictureNode {
  std::int64_t parent;         // index of a node before this one of the same tree; -1: a root
  std::int64_t begin, tokens;  // depths [begin, begin + tokens)
  std::int64_t prompt_tokens;  // of them, those that are prompt in every rollout below
  std::int64_t rollouts;       // below
};

struct PictureTree {
  std::int64_t first_node, nodes;  // nodes[first_node, first_node + nodes)
  std::int64_t node_count;         // of the tree; those not kept are missing at its end
  std::int64_t rollouts, logical, physical;
};

struct PictureEntry {
  std::string phase;             // "A" a trunk's forward, "B" a wave, "C" a trunk's backward
  std::int64_t level;            // open trunks above
  std::int64_t rows, path_rows;  // its own, and the rows of the trunks above that it reads
  std::int64_t rollouts;
  std::int64_t tree, trees;  // the first tree with rows in it, and how many have
  double seconds;            // predicted
};

struct PlanPicture {
  std::vector<PictureTree> trees;
  std::int64_t tree_count = 0;
  std::vector<PictureNode> nodes;
  std::vector<PictureEntry> schedule;
  std::int64_t entry_count = 0;
  std::int64_t logical = 0, physical = 0, trunk = 0, wave = 0;  // rows
  double seconds = 0;                                           // predicted, of the whole step
};

// Errors: InputError at `where` for anything that plan_picture does not write.
PlanPicture read_picture(const Json& json, const std::string& where);

}  // namespace espalier
