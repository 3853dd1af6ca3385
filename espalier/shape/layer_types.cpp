#include "espalier/shape/layer_types.h"

#include "espalier/base/error.h"

namespace espalier {

void set_mixers(const Members& config, LayerWords words, const std::shared_ptr<const Mixer>& mixer,
                std::vector<LayerShape>& layers, const std::function<bool(std::int64_t)>& absent) {
  constexpr const char* kMember = "layer_types";
  const bool named = config.has(kMember);
  if (named && (!config.at(kMember).is_array() || config.at(kMember).size() != layers.size()))
    config.fail(kMember, text_of("a list of ", layers.size(), " names"));
  for (std::size_t layer = 0; layer < layers.size(); ++layer) {
    if (!named) {
      if (absent(static_cast<std::int64_t>(layer))) layers[layer].mixer = mixer;
      continue;
    }
    const Json& type = config.at(kMember)[layer];
    if (type != words.attention && type != words.other)
      config.refuse("layer type " + shown(type), text_of("layers of ", words.attention, " and ", words.other));
    if (type == words.other) layers[layer].mixer = mixer;
  }
}

}  // namespace espalier
