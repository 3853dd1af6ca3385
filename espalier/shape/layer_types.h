// layer_types of a config.json: which layers have another mixer than attention.
#pragma once

#include <functional>
#include <memory>
#include <vector>

#include "espalier/shape/config_members.h"
#include "espalier/shape/layer_shape.h"

namespace espalier {

// The words of layer_types for layers of attention and for the others.
struct LayerWords {
  const char *attention, *other;
};

// Gives `mixer` to the layers that layer_types calls `words.other`; where it is absent, to those for which
// `absent(layer)` is true. Errors: InputError for a list that does not fit, UnsupportedError for other words.
void set_mixers(const Members& config, LayerWords words, const std::shared_ptr<const Mixer>& mixer,
                std::vector<LayerShape>& layers, const std::function<bool(std::int64_t)>& absent);

}  // namespace espalier
