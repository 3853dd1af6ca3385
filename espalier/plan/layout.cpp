// Trunks, chains, pieces and waves of one tree.
#include "espalier/plan/layout.h"

#include <algorithm>

#include "espalier/base/error.h"
#include "espalier/plan/packing.h"

namespace espalier {
namespace {

// Deepest nesting of trunks: schedules are recursive.
constexpr std::int32_t kDeepest = 4096;

}  // namespace

Layout::Unit Layout::unit_of(std::int32_t tree, std::int32_t node, std::int32_t from) const {
  const PrefixNode& at = forest_[tree].node(node);
  return {node, at.leaf_begin, at.leaf_end, from};
}

std::int64_t Layout::rows_of(std::int32_t tree, const Unit& unit) const {
  const TreeIndex& index = forest_[tree];
  if (unit.node < 0) return index.leaf_length(unit.leaf_begin) - unit.from;
  return index.subtree(unit.node).rows + index.node(unit.node).begin - unit.from;
}

Block Layout::block_of(const Place& place, std::int32_t leaf_begin, std::int32_t leaf_end, std::int32_t from,
                       std::int32_t to) const {
  Block block{place.tree, leaf_begin, leaf_end, from, to, {}};
  count_block(forest_, block);
  return block;
}

void Layout::add_dense(std::int32_t tree, LayoutResult& result) const {
  const Place place{.tree = tree};
  for (std::int32_t leaf = 0; leaf < forest_[tree].leaves(); ++leaf)
    decide(place, {-1, leaf, leaf + 1, 0}, result.items, result.loose);
}

void Layout::add_packed(std::int32_t tree, LayoutResult& result) const {
  const Place place{.tree = tree};
  const TreeIndex& index = forest_[tree];
  std::int32_t begin = 0;
  while (begin < index.leaves()) {
    if (index.leaf_length(begin) > budget_) {
      decide(place, {-1, begin, begin + 1, 0}, result.items, result.loose);
      ++begin;
      continue;
    }
    std::int32_t end = begin + 1;
    while (end < index.leaves() && index.rows_of_leaves(begin, end + 1) <= budget_) ++end;
    result.loose.push_back(block_of(place, begin, end, 0));
    begin = end;
  }
}

void Layout::add_shared(std::int32_t tree, LayoutResult& result) const {
  decide({.tree = tree}, unit_of(tree, 0, 0), result.items, result.loose);
}

bool Layout::trunk_asked(const Place& place, const Unit& unit) const {
  const TreeIndex& index = forest_[place.tree];
  if (!options_.phased || unit.node < 0 || index.node(unit.node).children.empty()) return false;
  const std::int64_t run = index.node(unit.node).end - 1 - unit.from;
  if (run > 0) return run > place.path_rows;
  // One common token above whole groups: no rows for a trunk, but the groups below have prompts of their own.
  const std::vector<std::int32_t>& children = index.node(unit.node).children;
  return place.path_rows == 0 && std::any_of(children.begin(), children.end(),
                                             [&](std::int32_t child) { return !index.node(child).children.empty(); });
}

void Layout::decide(const Place& place, const Unit& unit, std::vector<Draft>& items, std::vector<Block>& loose) const {
  const bool path = unit.node < 0 || forest_[place.tree].node(unit.node).children.empty();
  if (trunk_asked(place, unit)) {
    add_trunk(place, unit, items);
  } else if (rows_of(place.tree, unit) <= (path ? capacity(place) : whole_capacity(place)) || (path && options_.soft)) {
    loose.push_back(block_of(place, unit.leaf_begin, unit.leaf_end, unit.from));
  } else if (path) {
    add_chain(place, unit, items);
  } else if (trunk_pays(place, unit)) {
    add_trunk(place, unit, items);
  } else {
    dissolve(
        place, unit,
        [&](std::int32_t begin, std::int32_t end) { loose.push_back(block_of(place, begin, end, unit.from)); },
        [&](const Unit& part) { decide(place, part, items, loose); });
  }
}

template <class Small, class Large>
void Layout::dissolve(const Place& place, const Unit& unit, Small small, Large large) const {
  const TreeIndex& index = forest_[place.tree];
  const PrefixNode& at = index.node(unit.node);
  const std::int64_t run = at.end - unit.from, room = whole_capacity(place);
  std::int32_t piece_begin = unit.leaf_begin;
  std::int64_t piece_rows = 0;
  const auto flush = [&](std::int32_t end) {
    if (piece_rows > 0) small(piece_begin, end);
    piece_begin = end, piece_rows = 0;
  };
  const auto join = [&](const Unit& part, std::int64_t own) {
    if (run + own > room) {
      flush(part.leaf_begin);
      large(part);
      piece_begin = part.leaf_end;
      return;
    }
    if (piece_rows > 0 && piece_rows + own > room) flush(part.leaf_begin);
    piece_rows = (piece_rows > 0 ? piece_rows : run) + own;
  };
  // Children in order; leaves between them are rollouts that end at the node.
  std::int32_t leaf = unit.leaf_begin;
  for (std::int32_t child : at.children) {
    const PrefixNode& below = index.node(child);
    for (; leaf < below.leaf_begin; ++leaf) join({-1, leaf, leaf + 1, unit.from}, 0);
    join(unit_of(place.tree, child, unit.from), index.subtree(child).rows);
    leaf = below.leaf_end;
  }
  for (; leaf < unit.leaf_end; ++leaf) join({-1, leaf, leaf + 1, unit.from}, 0);
  flush(unit.leaf_end);
}

// A trunk costs an item of its own (few rows run slowly, every item touches all weight gradients) and the fork's token
// in every wave; dissolving costs the whole run in every piece.
bool Layout::trunk_pays(const Place& place, const Unit& unit) const {
  const PrefixNode& at = forest_[place.tree].node(unit.node);
  if (at.end - unit.from >= capacity(place)) return true;
  std::int64_t pieces = 0;
  dissolve(
      place, unit, [&](std::int32_t, std::int32_t) { ++pieces; }, [&](const Unit&) { ++pieces; });
  const Work run = work_of_depths(unit.from, at.end - 1, false, edges_.window()),
             fork = work_of_depths(at.end - 1, at.end, true, edges_.window());
  const double repeated = model_.marginal_seconds(run, budget_) * static_cast<double>(pieces);
  const double trunk = options_.item_seconds + model_.seconds(run, options_.trunk_state) +
                       model_.marginal_seconds(fork, budget_) * static_cast<double>(pieces);
  return trunk < repeated;
}

template <class Below>
void Layout::nest(Place place, const Unit& unit, std::int32_t to, bool ends, std::vector<Draft>& items,
                  Below below) const {
  const std::int64_t rows = to - unit.from + (place.fork >= 0 ? 1 : 0);
  if (rows == 0) {
    for (Draft& item : below(place)) items.push_back(std::move(item));
    return;
  }
  const std::int64_t pieces = options_.soft ? 1 : (rows + budget_ - 1) / budget_;
  if (place.depth + pieces > kDeepest)
    throw OptionError({"--token-budget", text_of("a budget that splits no path into more than ", kDeepest, " trunks"),
                       text_of(options_.budget, " rows"),
                       text_of("Give at least ", (place.path_rows + rows) / 2048 + 2)});
  const std::int64_t piece = (rows + pieces - 1) / pieces;
  std::vector<Draft> chain;
  std::int32_t from = unit.from;
  do {
    Draft draft;
    draft.fork = place.fork;
    draft.path_rows = place.path_rows;
    const std::int64_t own = piece - (place.fork >= 0 ? 1 : 0);
    const std::int32_t until = static_cast<std::int32_t>(std::min<std::int64_t>(to, from + own));
    const bool last = ends && until == to;
    draft.kind = last ? ItemKind::wave : ItemKind::trunk;
    draft.blocks.push_back(block_of(place, unit.leaf_begin, unit.leaf_end, from, last ? kToTheEnd : until));
    count_draft(forest_, edges_, draft);
    place = {place.tree, -1, place.path_rows + static_cast<std::int32_t>(draft.work.rows), place.depth + 1};
    chain.push_back(std::move(draft));
    from = until;
  } while (from < to);
  if (!ends) chain.back().below = below(place);
  for (std::size_t i = chain.size() - 1; i > 0; --i) chain[i - 1].below.push_back(std::move(chain[i]));
  items.push_back(std::move(chain.front()));
}

void Layout::add_trunk(const Place& place, const Unit& unit, std::vector<Draft>& items) const {
  const PrefixNode& at = forest_[place.tree].node(unit.node);
  nest(place, unit, at.end - 1, false, items, [&](Place inner) {
    inner.fork = unit.node;
    return below_fork(inner);
  });
}

void Layout::add_chain(const Place& place, const Unit& unit, std::vector<Draft>& items) const {
  nest(place, unit, forest_[place.tree].leaf_length(unit.leaf_begin), true, items,
       [](const Place&) { return std::vector<Draft>(); });
}

std::vector<Draft> Layout::below_fork(const Place& place) const {
  const PrefixNode& fork = forest_[place.tree].node(place.fork);
  std::vector<Draft> items;
  std::vector<Block> loose;
  for (std::int32_t child : fork.children) decide(place, unit_of(place.tree, child, fork.end), items, loose);
  pack(place, loose, items);
  items.front().takes_ends = true;
  return items;
}

void Layout::pack(const Place& place, std::vector<Block>& loose, std::vector<Draft>& items) const {
  std::vector<std::int64_t> rows(loose.size());
  std::transform(loose.begin(), loose.end(), rows.begin(), [](const Block& block) { return block.work.rows; });
  for (const std::vector<std::int32_t>& bin : pack_blocks(rows, capacity(place), options_.cp)) {
    Draft wave;
    wave.fork = place.fork;
    wave.path_rows = place.path_rows;
    for (std::int32_t block : bin) wave.blocks.push_back(loose[block]);
    count_draft(forest_, edges_, wave);
    items.push_back(std::move(wave));
  }
  loose.clear();
}

void Layout::pack_loose(LayoutResult& result) const { pack({}, result.loose, result.items); }

}  // namespace espalier
