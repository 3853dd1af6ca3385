// The tokens that end a response, as a model's directory names them.
#pragma once

#include <cstdint>
#include <filesystem>
#include <vector>

namespace espalier {

// eos_token_id of generation_config.json, else of config.json; empty where neither has one. Errors: InputError.
std::vector<std::int32_t> model_end_tokens(const std::filesystem::path& model);

// The same, and the tokenizer's eos token, read from its files without running it.
std::vector<std::int32_t> end_tokens(const std::filesystem::path& model);

}  // namespace espalier
