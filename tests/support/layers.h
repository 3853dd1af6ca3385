// Changes to the layers of a shape.
#pragma once

#include <algorithm>
#include <memory>
#include <vector>

#include "espalier/mixers/attention/shape.h"
#include "espalier/mixers/delta_rule/shape.h"
#include "espalier/shape/model_shape.h"

namespace espalier::testing {

// The first layer of attention's.
inline const AttentionShape& attention_of(const ModelShape& shape) {
  for (const LayerShape& layer : shape.layer)
    if (const auto* const attention = dynamic_cast<const Attention*>(layer.mixer.get())) return attention->shape;
  throw std::logic_error("no layer of attention");
}

// Calls change(attention, number of the layer) for every layer of attention, and takes what it leaves.
template <class Change>
void change_attention(ModelShape& shape, Change change) {
  for (std::size_t i = 0; i < shape.layer.size(); ++i)
    if (const auto* const attention = dynamic_cast<const Attention*>(shape.layer[i].mixer.get())) {
      AttentionShape changed = attention->shape;
      change(changed, i);
      shape.layer[i].mixer = std::make_shared<const Attention>(std::move(changed));
    }
}

// The first recurrent layer's.
inline const RecurrenceShape& recurrence_of(const ModelShape& shape) {
  for (const LayerShape& layer : shape.layer)
    if (const auto* const recurrent = dynamic_cast<const espalier::Recurrence*>(layer.mixer.get()))
      return recurrent->shape;
  throw std::logic_error("no recurrent layer");
}

// The recurrent ones among the first layers.
inline std::int64_t recurrent_before(const ModelShape& shape, std::int64_t layers) {
  return std::count_if(shape.layer.begin(), shape.layer.begin() + layers,
                       [](const LayerShape& layer) { return layer.mixer->state() > 0; });
}

// `of_layer`: 1 gives the layer experts, 0 a dense MLP.
inline void set_experts(ModelShape& shape, const std::vector<int>& of_layer) {
  for (std::size_t i = 0; i < of_layer.size(); ++i)
    shape.layer[i].mlp = of_layer[i] != 0 ? MlpKind::experts : MlpKind::dense;
}

// `of_layer`: 1 makes the layer recurrent; the others stay as they are.
inline void set_delta_rule(ModelShape& shape, const RecurrenceShape& states, const std::vector<int>& of_layer) {
  const auto mixer = std::make_shared<const DeltaRule>(states);
  for (std::size_t i = 0; i < of_layer.size(); ++i)
    if (of_layer[i] != 0) shape.layer[i].mixer = mixer;
}

inline void set_inner(ModelShape& shape, std::int64_t inner) {
  for (LayerShape& layer : shape.layer) layer.inner = inner;
}

// Norms behind the halves of blocks, in their place or besides those before them.
inline void set_norm_place(ModelShape& shape, NormPlace place) {
  for (LayerShape& layer : shape.layer) layer.norm_place = place;
  if (place == NormPlace::before) return;
  shape.names.attention_post_norm = "post_attention_layernorm";
  shape.names.mlp_post_norm = "post_feedforward_layernorm";
  shape.names.mlp_norm = "pre_feedforward_layernorm";
}

}  // namespace espalier::testing
