#include "espalier/step/attention_note.h"

#include "espalier/base/error.h"

namespace espalier {

std::string layers_beside_library(const ModelShape& shape, AttentionBy attention) {
  if (attention != AttentionBy::flash && attention != AttentionBy::cudnn) return "";
  std::int64_t layers = 0, own = 0;
  std::string reason;
  for (const LayerShape& layer : shape.layer) {
    const Mixer::LibraryUse library = layer.mixer->library();
    if (!library.attends) continue;
    ++layers;
    if (library.reason.empty()) continue;
    ++own;
    reason = library.reason;
  }
  if (own == 0) return "";
  return text_of(own, " of ", layers, " layers of attention (", reason, ") run on the own kernels: --attention ",
                 name_of(attention), " does not take them");
}

}  // namespace espalier
