// Tensors of a text model's files that no layer reads: keys and values of layers that read earlier layers'
// (Gemma 4 E2B and E4B).
#pragma once

#include <filesystem>
#include <string>
#include <vector>

namespace espalier {

// Modules by their names in files, behind the root ("layers.30.self_attn.k_proj"), by the config.json in the directory.
// Empty without one.
std::vector<std::string> unread_modules(const std::filesystem::path& directory);

}  // namespace espalier
