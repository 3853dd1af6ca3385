// The table of kinds: each has its row, <kind>_layer, in its folder.
#include "espalier/model/mixer_layer.h"

#include <array>

namespace espalier {

#define ESPALIER_MIXER(name) extern const MixerLayer name##_layer;
#include "espalier/mixers/kinds.def"
#undef ESPALIER_MIXER

const MixerLayer& mixer_layer(MixerKind kind) {
  static constexpr std::array kLayers{
#define ESPALIER_MIXER(name) &name##_layer,
#include "espalier/mixers/kinds.def"
#undef ESPALIER_MIXER
  };
  return *kLayers[static_cast<std::size_t>(kind)];
}

}  // namespace espalier
