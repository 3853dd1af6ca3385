#include "espalier/shape/file_names.h"

#include "espalier/base/error.h"

namespace espalier {
namespace {

constexpr std::string_view kOwnRoot = "model.", kOwnHead = "lm_head", kOwnEmbedding = "embed_tokens.", kDense = "mlp.";

}  // namespace

FileNames::FileNames(const ModelShape& shape)
    : names_(shape.names),
      same_(names_.file_root == kOwnRoot && names_.file_head == kOwnHead && !names_.half_blocks &&
            kOwnEmbedding == text_of(names_.file_embedding, ".") && !names_.dense_below_experts) {
  std::int64_t next = 0;
  for (const LayerShape& layer : shape.layer) {
    if (names_.half_blocks) first_half_.push_back(next);
    next += layer.mlp == MlpKind::none ? 1 : 2;
    dense_.push_back(names_.dense_below_experts && layer.mlp == MlpKind::dense);
  }
}

std::string FileNames::outer(std::string_view name) const {
  if (name.starts_with(kOwnHead)) return names_.file_head + std::string(name.substr(kOwnHead.size()));
  if (!name.starts_with(kOwnRoot)) return std::string(name);  // a value head
  name.remove_prefix(kOwnRoot.size());
  std::string rest(name);
  if (names_.half_blocks)
    rest = name.starts_with("norm.") ? "norm_f.weight" : "embeddings.weight";
  else if (name.starts_with(kOwnEmbedding))
    rest = names_.file_embedding + rest.substr(kOwnEmbedding.size() - 1);
  return names_.file_root + rest;
}

std::string FileNames::of(std::string_view name, std::int64_t layer, Of part) const {
  if (same_) return std::string(name);
  if (part == Of::outer) return outer(name);
  constexpr std::string_view kLayers = "layers.";
  const auto at = static_cast<std::size_t>(layer);
  const bool in_mlp = part == Of::mlp_norm || part == Of::mlp;
  std::string_view rest = name.substr(kOwnRoot.size() + kLayers.size());
  rest.remove_prefix(rest.find('.') + 1);  // behind the layer's number
  std::int64_t number = layer;
  std::string_view module;
  if (names_.half_blocks) {
    number = first_half_[at] + (in_mlp ? 1 : 0);
    module = part == Of::mixer || part == Of::mlp ? "mixer." : "norm.";
    rest.remove_prefix(rest.find('.') + 1);
  } else if (dense_[at] && rest.starts_with(kDense)) {
    module = "block_sparse_moe.";
    rest.remove_prefix(kDense.size());
  }
  std::string out = names_.file_root;
  return out.append(kLayers).append(std::to_string(number)).append(1, '.').append(module).append(rest);
}

}  // namespace espalier
