#include "espalier/plan/state_choice.h"

#include <algorithm>
#include <limits>
#include <span>

#include "espalier/base/error.h"

namespace espalier {
namespace {

// Trunks of one item are refined in at most so many runs of neighbours, and no more than that many items are walked.
constexpr std::int64_t kMostRuns = 16, kMostWalked = 8192;

void collect_trunks(Draft& item, std::vector<Draft*>& trunks, std::int64_t& items) {
  ++items;
  if (item.kind == ItemKind::trunk) trunks.push_back(&item);
  for (Draft& below : item.below) collect_trunks(below, trunks, items);
}

std::int64_t stored_by(const Draft& item, const ActivationBytes& bytes) {
  std::int64_t most = 0;
  for (const Draft& below : item.below) most = std::max(most, stored_by(below, bytes));
  return most + (item.kind == ItemKind::trunk ? bytes.stored(bytes.share_of(item.work), item.state) : 0);
}

}  // namespace

StateChoice::StateChoice(const CostModel& model, const ActivationBytes& bytes, const PlanOptions& options)
    : model_(model), bytes_(bytes), spill_room_(std::numeric_limits<std::int64_t>::max()) {
  if (options.trunk_state == SavedState::automatic && bytes.gradients()) {
    spill_room_ = options.spill_room;
    for (const ItemState state : kTrunkStates)
      if (!state.stores() || spill_room_ > 0) trunks_.push_back(state);
  } else {
    trunks_ = {options.trunk_state};
  }
  if (options.wave_state == SavedState::automatic && bytes.gradients())
    waves_.assign(std::begin(kWaveStates), std::end(kWaveStates));
  else
    waves_ = {options.wave_state == SavedState::recompute && bytes.gradients() ? SavedState::recompute
                                                                               : SavedState::keep};
}

void StateChoice::choose(std::vector<Draft>& items, std::int64_t room) const {
  std::int64_t stored = 0;
  for (Draft& item : items) {
    choose_item(item, room, 0);
    stored = std::max(stored, stored_by(item, bytes_));
  }
  // Bytes in flight to and from the store for one item are held beside the others, too.
  const std::int64_t in_flight = bytes_.in_flight(stored);
  if (in_flight == 0) return;
  for (Draft& item : items) choose_item(item, room, in_flight);
}

StateChoice::Found StateChoice::weigh(Draft& item, std::int64_t room, std::int64_t in_flight) const {
  const std::int64_t stored = stored_by(item, bytes_);
  in_flight = std::max(in_flight, bytes_.in_flight(stored));
  choose_waves(item, 0, room - in_flight);
  PeakWalk walk(bytes_);
  walk.run(program_of(std::span<const Draft>(&item, 1), bytes_.waves_in_flight()));
  DraftCost cost;
  add_cost(item, model_, cost);
  return {cost.seconds, walk.peaks(in_flight).peak(), stored};
}

void StateChoice::choose_waves(Draft& item, std::int64_t held, std::int64_t room) const {
  if (item.kind == ItemKind::trunk) {
    held += bytes_.saved(bytes_.share_of(item.work), item.state);
    for (Draft& below : item.below) choose_waves(below, held, room);
    return;
  }
  std::int64_t least = std::numeric_limits<std::int64_t>::max();
  for (const ItemState state : waves_) {  // by rising time
    const std::int64_t peak = bytes_.wave_peak(item.work, state);
    if (peak < least) item.state = state, least = peak;
    if (held + peak <= room) return;
  }
}

void StateChoice::choose_item(Draft& item, std::int64_t room, std::int64_t in_flight) const {
  if (item.kind == ItemKind::wave) return choose_waves(item, 0, room - in_flight);
  if (trunks_.size() == 1) {
    set_trunk_states(item, trunks_.front());
    return choose_waves(item, 0, room - std::max(in_flight, bytes_.in_flight(stored_by(item, bytes_))));
  }
  ItemState best = trunks_.front();
  Found least{std::numeric_limits<double>::infinity(), std::numeric_limits<std::int64_t>::max(), 0};
  for (const ItemState state : trunks_) {
    set_trunk_states(item, state);
    Found found = weigh(item, room, in_flight);
    if (found.stored > spill_room_) continue;
    const bool fits = found.peak <= room,
               better = least.peak <= room ? fits && found.seconds < least.seconds : fits || found.peak < least.peak;
    if (better) best = state, least = found;
    if (fits && state == trunks_.front()) break;  // nothing is faster
  }
  set_trunk_states(item, best);
  weigh(item, room, in_flight);
  if (least.peak <= room && best != trunks_.front()) refine(item, room, in_flight, least);
}

void StateChoice::refine(Draft& item, std::int64_t room, std::int64_t in_flight, Found best) const {
  std::vector<Draft*> trunks;
  std::int64_t items = 0;
  collect_trunks(item, trunks, items);
  const auto count = static_cast<std::int64_t>(trunks.size());
  const std::int64_t runs = std::min({count, kMostRuns, kMostWalked / items});
  if (count < 2 || runs < 1) return;
  for (std::int64_t run = 0; run < runs; ++run) {
    const std::int64_t begin = run * count / runs, end = (run + 1) * count / runs;
    ItemState own = trunks[static_cast<std::size_t>(begin)]->state;
    const auto set = [&](ItemState state) {
      for (std::int64_t trunk = begin; trunk < end; ++trunk) trunks[static_cast<std::size_t>(trunk)]->state = state;
    };
    for (const ItemState state : trunks_) {
      if (state == own) continue;
      set(state);
      const Found found = weigh(item, room, in_flight);
      if (found.peak <= room && found.stored <= spill_room_ && found.seconds < best.seconds) own = state, best = found;
    }
    set(own);
  }
  weigh(item, room, in_flight);
}

std::string path_text(const PathPlan& path) {
  const std::string form = path.latents ? "; path as latents" : "";
  if (!path.sleeps()) return form;
  const std::string where = text_of(path.latents ? form + "," : "; path", path.sharded ? " sharded" : " offloaded");
  if (path.layers_awake == 0) return where;
  return text_of(where, " but for ", path.layers_awake, path.layers_awake == 1 ? " layer" : " layers");
}

std::string states_text(const std::vector<Draft>& items) {
  std::string out;
  for (const auto& [kind, name] : {std::pair(ItemKind::trunk, "trunks"), {ItemKind::wave, "waves"}}) {
    std::map<std::string, std::int64_t> counts;
    count_states(items, kind, counts);
    if (counts.empty() || (counts.size() == 1 && counts.begin()->first == name_of(ItemState()))) continue;
    for (const auto& [state, count] : counts)
      out += counts.size() == 1 ? text_of("; ", name, ' ', state) : text_of("; ", count, ' ', name, ' ', state);
  }
  return out;
}

}  // namespace espalier
