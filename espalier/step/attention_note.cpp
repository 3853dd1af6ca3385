#include "espalier/step/attention_note.h"

#include "espalier/base/error.h"

namespace espalier {

std::string layers_beside_library(const ModelShape& shape, AttentionBy attention) {
  if (attention != AttentionBy::flash && attention != AttentionBy::cudnn) return "";
  const char* const of_all = shape.attention.soft_cap > 0          ? "soft caps"
                             : shape.value_dim() != shape.head_dim ? "values of another size than keys"
                                                                   : nullptr;
  std::int64_t layers = 0, own = 0;
  for (std::int64_t layer = 0; layer < shape.layers; ++layer) {
    if (shape.mixer_of(layer) != Mixer::attention) continue;
    ++layers;
    own += of_all != nullptr || shape.window_of(layer) > 0 ? 1 : 0;
  }
  if (own == 0) return "";
  return text_of(own, " of ", layers, " layers of attention (", of_all != nullptr ? of_all : "windows",
                 ") run on the own kernels: --attention ", name_of(attention), " does not take them");
}

}  // namespace espalier
