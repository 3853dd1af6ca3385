#include "espalier/step/attention_note.h"

#include "espalier/base/error.h"
#include "espalier/forecast/library_attention.h"

namespace espalier {

std::string layers_beside_library(const ModelShape& shape, AttentionBy attention) {
  if (attention != AttentionBy::flash && attention != AttentionBy::cudnn) return "";
  std::int64_t layers = 0, own = 0;
  std::string reason;
  for (std::int64_t layer = 0; layer < shape.layers; ++layer) {
    if (shape.mixer_of(layer) != Mixer::attention) continue;
    ++layers;
    const std::string of_layer = reason_for_own_kernels(shape, layer);
    if (of_layer.empty()) continue;
    ++own;
    reason = of_layer;
  }
  if (own == 0) return "";
  return text_of(own, " of ", layers, " layers of attention (", reason, ") run on the own kernels: --attention ",
                 name_of(attention), " does not take them");
}

}  // namespace espalier
