#include "espalier/checkpoint/half_block_names.h"

#include <array>
#include <charconv>
#include <optional>
#include <string_view>
#include <utility>

namespace espalier {
namespace {

constexpr std::string_view kOwnLayers = "model.layers.", kFileLayers = "backbone.layers.";

// "model.layers.12.mixer.D" -> {12, "mixer.D"}
struct LayerName {
  int layer;
  std::string_view rest;
};
std::optional<LayerName> layer_name(std::string_view name, std::string_view prefix) {
  if (!name.starts_with(prefix)) return {};
  const std::string_view text = name.substr(prefix.size());
  LayerName out{};
  const auto [end, error] = std::from_chars(text.begin(), text.end(), out.layer);
  if (error != std::errc() || end == text.end() || *end != '.') return {};
  out.rest = text.substr(static_cast<std::size_t>(end - text.begin()) + 1);
  return out;
}

std::optional<LayerName> layer_of_file(std::string_view name) {
  const auto own = layer_name(name, kFileLayers);
  return own ? own : layer_name(name, kOwnLayers);
}

enum class Half { mamba, attention, mlp };
struct HalfNames {
  Half half;
  std::string_view norm, module;

  // The beginnings of names behind a layer's number, in files and here.
  std::array<std::pair<std::string_view, std::string_view>, 2> beginnings() const {
    return {{{"norm.", norm}, {"mixer.", module}}};
  }
};
constexpr HalfNames kHalves[] = {{Half::mamba, "input_layernorm.", "mamba."},
                                 {Half::attention, "input_layernorm.", "self_attn."},
                                 {Half::mlp, "post_attention_layernorm.", "mlp."}};

std::optional<Half> half_of(std::string_view rest) {
  if (rest == "mixer.in_proj.weight") return Half::mamba;
  if (rest == "mixer.q_proj.weight") return Half::attention;
  if (rest == "mixer.up_proj.weight" || rest == "mixer.gate.weight") return Half::mlp;  // or experts
  return {};
}

// The outer parameters.
constexpr std::pair<std::string_view, std::string_view> kOuter[] = {{"embeddings.weight", "model.embed_tokens.weight"},
                                                                    {"norm_f.weight", "model.norm.weight"}};

}  // namespace

std::map<std::string, std::string> names_of_blocks(std::span<const std::string> names_of_files) {
  std::map<int, Half> halves;
  for (const std::string& name : names_of_files)
    if (const auto layer = layer_of_file(name))
      if (const auto half = half_of(layer->rest)) halves[layer->layer] = *half;
  std::map<std::string, std::string> out;
  if (halves.empty()) return out;
  std::map<int, int> block_of;
  int block = -1;
  for (const auto& [layer, half] : halves) block_of[layer] = half == Half::mlp ? block : ++block;
  for (const std::string& name : names_of_files) {
    for (const auto& [file, own] : kOuter)
      if (name == "backbone." + std::string(file) || name == "model." + std::string(file)) out[name] = own;
    const auto layer = layer_of_file(name);
    if (!layer || !halves.contains(layer->layer)) continue;
    const HalfNames& of = kHalves[static_cast<int>(halves[layer->layer])];
    const std::string prefix = std::string(kOwnLayers) + std::to_string(block_of[layer->layer]) + ".";
    for (const auto& [file, own] : of.beginnings())
      if (layer->rest.starts_with(file))
        out[name] = prefix + std::string(own) + std::string(layer->rest.substr(file.size()));
  }
  return out;
}

}  // namespace espalier
