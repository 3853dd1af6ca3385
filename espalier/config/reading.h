// A model's shape while its config.json is read: attention as most layers have it, from which the layers are made.
#pragma once

#include "espalier/config/model_families.h"
#include "espalier/mixers/attention/shape.h"
#include "espalier/mixers/latent_attention/shape.h"
#include "espalier/shape/config_members.h"

namespace espalier {

struct Reading {
  ModelShape shape;  // its layers have MLPs from the start, and get their mixers at the end
  AttentionShape attention;
  LatentShape latent;                        // in families with latent attention, instead
  AttentionShape full_attention;             // of layers without a window, in families with Family::full_head_dim
  Rope window_rope;                          // of layers with a window, where they have their own (WindowRope)
  std::int64_t window = 0;                   // of these layers; 0: none
  std::vector<std::uint8_t> windowed = {};   // one per layer, 1: it is of the kind that has a window; empty: none is
  std::vector<std::int64_t> source = {};     // one per layer, Mixer::source; empty: all layers have rows of their own
  std::vector<std::uint8_t> unrotated = {};  // one per layer, 1: nothing rotates; empty: all layers rotate
};

}  // namespace espalier
