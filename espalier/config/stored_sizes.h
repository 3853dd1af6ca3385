// Sizes of heads that a model's config.json leaves out, read from the shapes of its tensors.
//
// A config written by one version of transformers may lack a member that another version of the same class defaults
// otherwise: Qwen3-MoE's head_dim was hidden_size / num_attention_heads, then 128. The tensors decide.
#pragma once

#include <filesystem>

#include "espalier/base/json.h"

namespace espalier {

// Adds head_dim (absent or null) and num_key_value_heads (absent) to a config, as the directory's tensors have them.
// Without readable weights, and with latent attention, nothing is added; the loader reports what is wrong with weights.
void add_stored_sizes(const std::filesystem::path& directory, Json& config);

}  // namespace espalier
