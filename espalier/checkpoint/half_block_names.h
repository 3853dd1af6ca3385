// Names of Nemotron-H's files. Their layers are halves of blocks, numbered through; a block here is a mixer with the
// MLP behind it, or without one:
//
//   backbone.layers.7.norm, .mixer.in_proj   model.layers.4.input_layernorm, .mamba.in_proj
//   backbone.layers.8.norm, .mixer.up_proj   model.layers.4.post_attention_layernorm, .mlp.up_proj
//   backbone.embeddings, backbone.norm_f     model.embed_tokens, model.norm
#pragma once

#include <map>
#include <span>
#include <string>

namespace espalier {

// Maps from the files' names to the names here, and back; other names are not in the result. Files may also begin
// with "model.", as transformers names its modules.
std::map<std::string, std::string> names_of_blocks(std::span<const std::string> names_of_files);
std::map<std::string, std::string> names_of_half_blocks(std::span<const std::string> names_of_parameters);

}  // namespace espalier
