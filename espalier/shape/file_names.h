// Names of parameters in a model's own files, which may differ from the names here (ParameterNames).
//
// Layers of Nemotron-H's files are halves of blocks, numbered through; a block here is a mixer with the MLP behind it,
// or without one:
//
//   backbone.layers.7.norm, .mixer.in_proj   model.layers.4.input_layernorm, .mamba.in_proj
//   backbone.layers.8.norm, .mixer.up_proj   model.layers.4.post_attention_layernorm, .mlp.up_proj
//   backbone.embeddings, backbone.norm_f     model.embed_tokens, model.norm
//
// transformers' modules have "model." in place of "backbone.". Beside a vision tower names begin with
// "model.language_model." or "language_model.model.".
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "espalier/shape/model_shape.h"

namespace espalier {

class FileNames {
 public:
  explicit FileNames(const ModelShape& shape);

  // The part of a model that a parameter belongs to.
  enum class Of : std::uint8_t { outer, mixer_norm, mixer, mlp_norm, mlp };
  // The name in files; `name` is the name here. `layer`: unless it is outer.
  std::string of(std::string_view name, std::int64_t layer, Of part) const;
  // True if files have the names that parameters have here.
  bool same() const { return same_; }

 private:
  std::string outer(std::string_view name) const;

  const ParameterNames& names_;
  bool same_;
  std::vector<std::int64_t> first_half_;  // of each block, in files of half blocks
  std::vector<bool> dense_;               // layers whose dense MLPs stand below the module of experts
};

}  // namespace espalier
