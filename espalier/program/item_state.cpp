#include "espalier/program/item_state.h"

namespace espalier {
namespace {

const char* word_of(ItemState::Member member) {
  return member == kKeep ? "kept" : member == kRecompute ? "recomputed" : "offloaded";
}

}  // namespace

std::string name_of(ItemState state) {
  for (const SavedState all : {SavedState::keep, SavedState::recompute, SavedState::offload})
    if (state == ItemState(all)) return word_of(state.mlp);
  if (state.stream == state.attention)
    return std::string(word_of(state.stream)) + ", gate and up " + word_of(state.mlp);
  if (state.attention == state.mlp)
    return std::string("stream ") + word_of(state.stream) + ", the rest " + word_of(state.mlp);
  return std::string("stream ") + word_of(state.stream) + ", attention " + word_of(state.attention) + ", gate and up " +
         word_of(state.mlp);
}

}  // namespace espalier
