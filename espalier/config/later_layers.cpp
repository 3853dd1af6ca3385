#include "espalier/config/later_layers.h"

namespace espalier {
namespace {

constexpr std::int64_t kAbsentWidth = 256, kAbsentVocabulary = 262144;

void read_sources(const Members& config, Reading& reading) {
  constexpr const char* kMember = "num_kv_shared_layers";
  std::vector<LayerShape>& layers = reading.shape.layer;
  const auto count = static_cast<std::int64_t>(layers.size());
  const std::int64_t readers = config.integer(kMember, 0, count - 1, 0);
  if (readers == 0) return;
  const bool wide = config.flag("use_double_wide_mlp", false);
  const auto is_windowed = [&](std::int64_t layer) { return reading.windowed[static_cast<std::size_t>(layer)]; };
  reading.source.assign(layers.size(), -1);
  for (std::int64_t layer = count - readers; layer < count; ++layer) {
    std::int64_t source = count - readers - 1;
    while (source >= 0 && is_windowed(source) != is_windowed(layer)) --source;
    if (source < 0)
      config.fail(kMember, text_of("so few layers that one of the type of layer ", layer, " has keys of its own"));
    reading.source[static_cast<std::size_t>(layer)] = source;
    layers[static_cast<std::size_t>(source)].is_read_later = true;
    if (wide) layers[static_cast<std::size_t>(layer)].inner *= 2;
  }
  if (wide && reading.shape.experts > 0)
    config.refuse("use_double_wide_mlp = true beside enable_moe_block = true", "MLPs of one width beside experts");
}

}  // namespace

void read_later_layers(const Members& config, Reading& reading) {
  read_sources(config, reading);
  LayerInputs& inputs = reading.shape.layer_inputs;
  inputs.width = config.integer("hidden_size_per_layer_input", 0, 1 << 20, kAbsentWidth);
  if (inputs.width > 0 && reading.shape.experts > 0)
    config.refuse(text_of("hidden_size_per_layer_input = ", inputs.width, " beside enable_moe_block = true"),
                  "0 in a model with experts, as Gemma 4 26B-A4B has it");
  if (inputs.width > 0) inputs.vocabulary = config.integer("vocab_size_per_layer_input", 1, 1 << 26, kAbsentVocabulary);
}

}  // namespace espalier
