#include "espalier/shape/mixer.h"

namespace espalier {

std::string_view name_of(MixerKind kind) {
  static constexpr std::string_view kNames[] = {
#define ESPALIER_MIXER(name) #name,
#include "espalier/mixers/kinds.def"
#undef ESPALIER_MIXER
  };
  return kNames[static_cast<std::size_t>(kind)];
}

}  // namespace espalier
