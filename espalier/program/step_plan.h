// The plan of one optimizer step: trunks, waves, the rows of each, and the predicted cost.
//
// A plan is a pure function of the prefix trees, the model's shape, the options and the machine's profile. It holds no
// tensors. The schedule (program/schedule.h) walks it: forward a trunk, run everything below it, backward the trunk.
//
// Row rule. A rollout of length n occupies depths 0 .. n-1; the row at depth d holds token d and predicts token d+1.
// A set of rows is a forest of segments in depth-first order. Row i sees every row of the path above, and row j of its
// own set iff j <= i < subtree_end(segment of j). So the row at depth d sees exactly d+1 rows, in any plan.
//
// The fork. If a trunk ends at a fork, its last token is not a row of the trunk. Instead, every item below starts with
// that token, as a segment of one row above the others, which has the edges to the different next tokens. Rollouts that
// end at the fork are counted by that segment in the first item below, and nowhere else. A chain (a run cut for the
// budget) has no fork and repeats nothing.
#pragma once

#include <cstdint>
#include <limits>
#include <span>
#include <string>
#include <vector>

#include "espalier/base/json_fwd.h"
#include "espalier/options/choices.h"
#include "espalier/program/item_state.h"
#include "espalier/program/window_rows.h"
#include "espalier/rollout/rollout.h"

namespace espalier {

// Rows [row, row + end - begin) hold tokens [begin, end) of `rollout`, at positions begin .. end-1. The rollouts that
// run through them are set.rollouts[first, last): all of them have these tokens.
struct RowSegment {
  std::int32_t rollout;
  std::int32_t begin, end;
  std::int32_t row;
  std::int32_t subtree_end;   // one past the last row below this segment (itself included)
  std::int32_t multiplicity;  // last - first: the weight of a shared row in statistics
  std::int32_t first, last;

  bool operator==(const RowSegment&) const = default;
};

// Target `position` of `rollout` (id `target`) is predicted by `row`: a token of its response, or a given target.
struct LossEdge {
  std::int32_t row;
  std::int32_t target;
  std::int32_t rollout;
  std::int32_t position;
};

struct RowSet {
  std::vector<RowSegment> segments;    // ordered by row, without gaps
  std::vector<std::int32_t> rollouts;  // of this item, depth-first; see RowSegment
  std::int32_t rows = 0;
  std::int32_t outputs = 0;       // rows with at least one edge, once for each temperature among its edges
  std::int64_t pairs = 0;         // visible (query row, key row) pairs, path included
  std::int64_t output_pairs = 0;  // pairs of output rows
  std::int64_t window_pairs = 0, window_output_pairs = 0;  // in layers with a window; 0 if no layer has one
  std::int64_t forks = 0;                                  // runs that other runs of the set follow

  bool operator==(const RowSet&) const = default;
};

// Rows [begin, end) of a set without a branch: consecutive segments, each followed by the next one only, form one run.
struct RowRun {
  std::int32_t begin, end;
  std::int32_t parent;  // index of the run that it follows; -1: none in the set
  std::int32_t fork;    // index among the runs that others follow; -1: no run follows it
};
// In the order of the rows.
std::vector<RowRun> runs_of(const RowSet& set);

// The edges of a set, ordered by (row, rollout, position): targets whose mask is 1, or all of them. They are built when
// the item runs, because a step may have hundreds of millions.
std::vector<LossEdge> edges_of(const RowSet& set, std::span<const Rollout> rollouts, bool all_logprobs);

// The first edge of each output, in that order: of each row, or by temperature of each (row, temperature).
std::vector<LossEdge> outputs_of(const std::vector<LossEdge>& edges, std::span<const Rollout> rollouts,
                                 bool by_temperature);

// The first edge of each distribution of the head, in that order: of each (row, temperature, kept set).
std::vector<LossEdge> distributions_of(const std::vector<LossEdge>& edges, std::span<const Rollout> rollouts);

enum class ItemKind { wave, trunk };

struct PlanItem {
  static constexpr std::int32_t kEveryRank = -1;

  ItemKind kind = ItemKind::wave;
  RowSet set;
  std::int32_t path_rows = 0;          // rows of the open trunks above
  ItemState state;                     // waves are never offloaded
  std::int32_t cp_rank = kEveryRank;   // the rank of cp that runs the item; kEveryRank: each runs its share of rows
  std::vector<PlanItem> below;         // trunks only, in plan order
  std::vector<std::int32_t> finished;  // rollouts whose last edge is in this set; rollouts without edges are in no item
  double flops = 0;                    // forward + backward (+ recompute)
  double seconds = 0;                  // predicted

  bool operator==(const PlanItem&) const = default;  // the same rows in the same order, at the same predicted cost
};

struct TreePlan {
  Schedule schedule = Schedule::dense;  // the schedule of this tree
  std::int64_t rollouts = 0;
  std::int64_t trunks = 0, waves = 0;  // waves that hold rows of this tree
  std::int64_t logical_rows = 0, physical_rows = 0;
  std::string reason;
};

struct PhasePeaks {
  std::int64_t a = 0, b = 0, c = 0;  // bytes: trunk forwards, waves, trunk backwards; 0 without a trunk
  std::int64_t peak() const { return a > b ? (a > c ? a : c) : (b > c ? b : c); }
  // The peaks plus `held` bytes in every phase that ran.
  PhasePeaks above(std::int64_t held) const {
    return {a == 0 ? 0 : held + a, b == 0 ? 0 : held + b, c == 0 ? 0 : held + c};
  }
};

// The predicted cost of a plan.
struct PlanCost {
  double flops = 0;
  double seconds = 0;
  PhasePeaks bytes;                    // all bytes that the process holds on the device
  std::int64_t stored_bytes = 0;       // of trunks: the most bytes offloaded at a time
  std::int64_t path_stored_bytes = 0;  // of the path

  std::int64_t all_stored() const { return stored_bytes + path_stored_bytes; }

  bool fits = true;  // within the memory budget
};

// One attempt to run a step within the memory budget.
struct TriedPlan {
  std::string what;
  PlanCost cost;
};

// The location of the path. The first layers are always in memory. The other layers are in memory while in use, and
// otherwise in a store or sharded over cp. `latents`: layers are carried as latents (model/path_latents.h).
struct PathPlan {
  static constexpr std::int32_t kEveryLayer = std::numeric_limits<std::int32_t>::max();

  std::int32_t layers_awake = kEveryLayer;
  bool sharded = false;
  bool latents = false;

  bool sleeps() const { return layers_awake != kEveryLayer; }
  PathState state() const {
    if (!sleeps()) return latents ? PathState::latents : PathState::keep;
    if (latents) return sharded ? PathState::latents_divide : PathState::latents_offload;
    return sharded ? PathState::divide : PathState::offload;
  }
  bool operator==(const PathPlan&) const = default;
};

struct StepPlan {
  std::vector<PlanItem> items;
  std::vector<TreePlan> trees;
  std::int64_t logical_rows = 0;  // rows of a dense run: the sum of rollout lengths
  std::int64_t trunk_rows = 0, wave_rows = 0;
  std::int64_t trunks = 0, waves = 0;
  std::int32_t max_path_rows = 0;    // most rows open at once, above any item
  std::int64_t max_window_rows = 0;  // the most of these that layers with a window keep (program/window_rows.h)
  std::int32_t max_rows = 0;         // most rows of one set
  PathPlan path;
  std::int64_t token_budget = 0;   // rows in one wave
  bool budget_given = false;       // true: no set has more than max(token_budget, 2) rows
  std::int64_t memory_budget = 0;  // bytes; 0: unlimited
  std::int64_t missing_bytes = 0;  // beyond the budget; 0: the plan fits
  std::string remedy;              // for users: options that would make it fit; empty if it fits
  bool all_logprobs = false;       // masked response tokens have edges too
  bool by_temperature = true;      // false: a critic's plan, whose outputs have no temperature
  std::int64_t window = 0;         // of the model's layers with a window; 0: no layer has one
  PathRows path_rows() const { return {max_path_rows, max_window_rows}; }
  Schedule requested = Schedule::automatic;
  PlanCost chosen;
  std::vector<TriedPlan> tried;    // under the chosen schedule, in order; empty if the first attempt fits
  PlanCost dense, packed, phased;  // the same step under one schedule throughout
  double ceiling = 1;              // FLOPs dense / FLOPs with every shared row once (mathematics, section 9)
  std::string machine;             // one line about the profile that predicted the seconds

  std::int64_t physical_rows() const { return trunk_rows + wave_rows; }
};

// Checks that each rollout's rows and edges appear exactly once, that every row sees exactly its path, and that counts
// add up. Throws InternalError naming the first item that breaks a rule.
void validate(const StepPlan& plan, std::span<const Rollout> rollouts);

Json to_json(const StepPlan& plan);
std::string explain(const StepPlan& plan);  // for users

}  // namespace espalier
