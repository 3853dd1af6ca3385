// The treatment of an item's saved members between its forward and its backward.
//
// Three groups of members differ in cost. The stream (the inputs of the layers) is small, and only a forward from the
// first layer could recompute it. The first half of a block (keys, values, queries, the result of attention, the stream
// after it) is expensive to recompute if paths are long. The second half (gate and up of the MLP or of experts, and the
// router's members) takes more than half of all bytes, and one product recomputes it.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "espalier/options/choices.h"

namespace espalier {

struct ItemState {
  enum class Member : std::uint8_t { keep, recompute, offload };

  Member stream = Member::keep;  // never recomputed
  Member attention = Member::keep, mlp = Member::keep;

  constexpr ItemState() = default;
  constexpr ItemState(Member of_stream, Member of_attention, Member of_mlp)
      : stream(of_stream), attention(of_attention), mlp(of_mlp) {}
  // The state for a value of --trunk-state or --wave-state; automatic: keep.
  constexpr ItemState(SavedState all)  // NOLINT: the word is the state
      : stream(all == SavedState::offload ? Member::offload : Member::keep),
        attention(all == SavedState::offload     ? Member::offload
                  : all == SavedState::recompute ? Member::recompute
                                                 : Member::keep),
        mlp(attention) {}

  constexpr bool recomputes_attention() const { return attention == Member::recompute; }
  constexpr bool recomputes_mlp() const { return mlp == Member::recompute; }
  constexpr bool recomputes() const { return recomputes_attention() || recomputes_mlp(); }
  constexpr bool stores() const {
    return stream == Member::offload || attention == Member::offload || mlp == Member::offload;
  }
  // The stored members of a layer form one contiguous range; if the first half of a block is recomputed, the second
  // half is too.
  constexpr bool possible() const {
    const bool gap = stream == Member::offload && attention == Member::keep && mlp == Member::offload;
    return stream != Member::recompute && !gap && (!recomputes_attention() || recomputes_mlp());
  }

  bool operator==(const ItemState&) const = default;
};

// "kept", "recomputed", "offloaded", or the state of each group if they differ.
std::string name_of(ItemState state);

// Adds the states of the items of one kind, and of everything below them, by name.
template <class Item, class Kind>
void count_states(const std::vector<Item>& items, Kind kind, std::map<std::string, std::int64_t>& counts) {
  for (const Item& item : items) {
    if (item.kind == kind) ++counts[name_of(item.state)];
    count_states(item.below, kind, counts);
  }
}

// The states that a plan may choose for trunks and for waves. The first is the one used when memory is ample; states of
// waves are in order of increasing time.
inline constexpr ItemState::Member kKeep = ItemState::Member::keep, kRecompute = ItemState::Member::recompute,
                                   kOffload = ItemState::Member::offload;
inline constexpr ItemState kTrunkStates[] = {
    {kKeep, kKeep, kKeep},          {kKeep, kKeep, kRecompute},       {kKeep, kKeep, kOffload},
    {kKeep, kOffload, kOffload},    {kKeep, kOffload, kRecompute},    {kKeep, kRecompute, kRecompute},
    {kOffload, kOffload, kOffload}, {kOffload, kOffload, kRecompute}, {kOffload, kRecompute, kRecompute}};
inline constexpr ItemState kWaveStates[] = {
    {kKeep, kKeep, kKeep}, {kKeep, kKeep, kRecompute}, {kKeep, kRecompute, kRecompute}};

}  // namespace espalier
