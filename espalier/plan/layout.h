// One tree under one schedule and one budget: which runs are trunks, which blocks go into waves.
//
// Budget. No set has more rows than max(budget, 2): a fork's repeated token and one token more are the least a wave
// below a fork can hold. A soft budget (nobody asked for it) may be passed by what cannot be divided without a chain: a
// single path, a trunk, a fork's own row.
#pragma once

#include <cstdint>
#include <vector>

#include "espalier/plan/draft.h"

namespace espalier {

struct LayoutOptions {
  std::int64_t budget = 4096;
  bool soft = false;
  ItemState trunk_state;    // what trunks would cost
  bool phased = false;      // a shared run is a trunk where it is longer than the path above it, whatever it costs
  std::int64_t cp = 1;      // ranks that have waves dealt to them: what would fill one wave is shared among them
  double item_seconds = 0;  // of an item, whatever its rows, beside what the model says
};

// Items of a step. `loose` blocks start at depth 0 and may share waves with those of other trees.
struct LayoutResult {
  std::vector<Draft> items;
  std::vector<Block> loose;
};

class Layout {
 public:
  Layout(const Forest& forest, const EdgeIndex& edges, const CostModel& model, const LayoutOptions& options)
      : forest_(forest),
        edges_(edges),
        model_(model),
        options_(options),
        budget_(options.budget < 2 ? 2 : options.budget) {}

  // Every rollout on its own.
  void add_dense(std::int32_t tree, LayoutResult& result) const;
  // No trunks: the tree, or its leaves in order in as few sets as the budget allows, each with all it needs.
  void add_packed(std::int32_t tree, LayoutResult& result) const;
  // A run that fits a wave stays whole; a larger shared run is a trunk where that is cheaper than repeating it. With
  // options.phased every prompt is a trunk, below a common header too, and what responses share is decided by cost.
  void add_shared(std::int32_t tree, LayoutResult& result) const;

  // Waves of the loose blocks, first-fit decreasing, appended to the items.
  void pack_loose(LayoutResult& result) const;

 private:
  // Where items are put: below `fork` (-1: at depth 0 or after a chain), with `path_rows` open above.
  struct Place {
    std::int32_t tree = 0;
    std::int32_t fork = -1;
    std::int32_t path_rows = 0;
    std::int32_t depth = 0;  // open trunks
  };
  // The part of a tree at and below `node` (-1: the single leaf), from depth `from`, which may lie above the node.
  struct Unit {
    std::int32_t node;
    std::int32_t leaf_begin, leaf_end;
    std::int32_t from;
  };

  // Rows of blocks in one set; the fork's own row is not counted against a soft budget.
  std::int64_t capacity(const Place& place) const { return budget_ - (place.fork >= 0 && !options_.soft ? 1 : 0); }
  // Rows of a tree, or of a part of one, that stays whole in a wave.
  std::int64_t whole_capacity(const Place& place) const { return capacity(place) / options_.cp; }
  std::int64_t rows_of(std::int32_t tree, const Unit& unit) const;
  Unit unit_of(std::int32_t tree, std::int32_t node, std::int32_t from) const;

  void decide(const Place& place, const Unit& unit, std::vector<Draft>& items, std::vector<Block>& loose) const;
  bool trunk_asked(const Place& place, const Unit& unit) const;
  bool trunk_pays(const Place& place, const Unit& unit) const;
  // The node's run, repeated in every piece: calls small(leaf_begin, leaf_end) for pieces that fit the capacity and
  // large(unit) for children that do not.
  template <class Small, class Large>
  void dissolve(const Place& place, const Unit& unit, Small small, Large large) const;

  void add_trunk(const Place& place, const Unit& unit, std::vector<Draft>& items) const;
  void add_chain(const Place& place, const Unit& unit, std::vector<Draft>& items) const;
  std::vector<Draft> below_fork(const Place& place) const;
  // Trunks (the last a wave if `ends`) over depths [from, to), nested; `below` goes into the innermost trunk.
  template <class Below>
  void nest(Place place, const Unit& unit, std::int32_t to, bool ends, std::vector<Draft>& items, Below below) const;
  Block block_of(const Place& place, std::int32_t leaf_begin, std::int32_t leaf_end, std::int32_t from,
                 std::int32_t to = kToTheEnd) const;
  void pack(const Place& place, std::vector<Block>& loose, std::vector<Draft>& items) const;

  const Forest& forest_;
  const EdgeIndex& edges_;
  const CostModel& model_;
  LayoutOptions options_;
  std::int64_t budget_;
};

}  // namespace espalier
