#include "espalier/state/layer_notes.h"

#include <algorithm>

#include "espalier/base/error.h"

namespace espalier {

std::string layers_beside_library(const ModelShape& shape, AttentionKernels attention, int capability) {
  if (attention == AttentionKernels::automatic || !row_of(attention).composed) return "";
  std::int64_t layers = 0, own = 0;
  std::string reason;
  for (const LayerShape& layer : shape.layer) {
    const std::optional<AttentionHeads> heads = layer.mixer->attended();
    if (!heads) continue;
    ++layers;
    const std::string against = row_of(attention).reason_against(*heads, capability);
    if (against.empty()) continue;
    ++own;
    reason = against;
  }
  if (own == 0) return "";
  return text_of(own, " of ", layers, " layers of attention (", reason, ") run on the own kernels: --attention ",
                 name_of(attention), " does not take them");
}

std::string layers_without_chunks(const ModelShape& shape, DType dtype, const std::string& (*try_chunks)()) {
  const auto fits = [](const LayerShape& layer) { return layer.mixer->fits_chunks(); };
  if (try_chunks == nullptr || dtype != DType::bfloat16 || std::ranges::none_of(shape.layer, fits)) return "";
  const std::string& why = try_chunks();
  if (why.empty()) return "";
  return text_of("recurrent layers run row by row, which is slower: in chunks on this GPU, ", why,
                 "; please report this");
}

}  // namespace espalier
