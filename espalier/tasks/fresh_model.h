// The small models that the closed loop starts from when none is given.
#pragma once

#include <cstdint>
#include <filesystem>

#include "espalier/base/json.h"
#include "espalier/options/choices.h"

namespace espalier {

// config.json of a fresh model: dense is Qwen3, moe Qwen3-MoE. `positions`: tokens of the longest rollout.
Json fresh_config(FreshModel kind, std::int64_t positions);

// Writes that config.json and a tokenizer of the built-in vocabulary into `directory`, which is created: a model
// directory without weights.
// Errors: OptionError where the directory cannot be written.
void write_fresh_model(const std::filesystem::path& directory, const Json& config);

}  // namespace espalier
