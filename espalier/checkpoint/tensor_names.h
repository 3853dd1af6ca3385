// Names of tensors in checkpoints, as transformers and peft write them.
#pragma once

#include <string_view>

namespace espalier {

inline constexpr const char *kEmbeddingName = "model.embed_tokens.weight", *kHeadName = "lm_head.weight";
// Before the names of a decoder's tensors, and before all names of an adapter's.
inline constexpr const char *kDecoderPrefix = "model.", *kAdapterPrefix = "base_model.model.";

}  // namespace espalier
