// The layout of one tree under one schedule and one budget: which runs become trunks, and which blocks form waves.
//
// Budget: no set has more rows than max(budget, 2), because a wave below a fork holds at least the fork's repeated
// token and one more. A soft budget (one that the planner chose) may be exceeded by rows that only a chain could split:
// a single path, a trunk, a fork's own row.
#pragma once

#include <cstdint>
#include <vector>

#include "espalier/plan/draft.h"

namespace espalier {

struct LayoutOptions {
  std::int64_t budget = 4096;
  bool soft = false;
  ItemState trunk_state;    // the state assumed for the cost of trunks
  bool phased = false;      // a shared run longer than the path above it is a trunk, whatever its cost
  std::int64_t cp = 1;      // ranks that have waves dealt to them: rows that would fill one wave are split among them
  double item_seconds = 0;  // fixed seconds of an item beyond the cost model
};

// The items of a step. `loose` blocks start at depth 0 and may share waves with blocks of other trees.
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

  // The next three append a tree's items and loose blocks. OptionError: the budget splits a path into more than 4,096
  // trunks below one another.

  // Every rollout on its own.
  void add_dense(std::int32_t tree, LayoutResult& result) const;
  // No trunks: the tree, or its leaves in order in as few sets as the budget allows, each with all rows above them.
  void add_packed(std::int32_t tree, LayoutResult& result) const;
  // A run that fits a wave stays whole; a larger shared run becomes a trunk if that is cheaper than repeating it. With
  // options.phased every prompt is a trunk, also below a common header; cost decides runs shared by responses.
  void add_shared(std::int32_t tree, LayoutResult& result) const;

  // Packs the loose blocks into waves, first-fit decreasing, and appends them to the items.
  void pack_loose(LayoutResult& result) const;

 private:
  // The place of items: below `fork` (-1: at depth 0 or after a chain), with `path_rows` open rows above.
  struct Place {
    std::int32_t tree = 0;
    std::int32_t fork = -1;
    std::int32_t path_rows = 0;
    std::int32_t depth = 0;  // open trunks
  };
  // The part of a tree at and below `node` (-1: the single leaf), from depth `from`, which may be above the node.
  struct Unit {
    std::int32_t node;
    std::int32_t leaf_begin, leaf_end;
    std::int32_t from;
  };

  // Rows of blocks in one set; the fork's own row is not counted against a soft budget.
  std::int64_t capacity(const Place& place) const { return budget_ - (place.fork >= 0 && !options_.soft ? 1 : 0); }
  // The most rows of a tree, or of a part, that stays whole in a wave.
  std::int64_t whole_capacity(const Place& place) const { return capacity(place) / options_.cp; }
  std::int64_t rows_of(std::int32_t tree, const Unit& unit) const;
  Unit unit_of(std::int32_t tree, std::int32_t node, std::int32_t from) const;

  void decide(const Place& place, const Unit& unit, std::vector<Draft>& items, std::vector<Block>& loose) const;
  bool trunk_asked(const Place& place, const Unit& unit) const;
  bool trunk_pays(const Place& place, const Unit& unit) const;
  // Repeats the node's run in every piece: calls small(leaf_begin, leaf_end) for pieces that fit the capacity and
  // large(unit) for children that do not fit.
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
