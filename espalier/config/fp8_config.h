// Weights that files hold in FP8 (base/fp8.h), by config.json.
//
// Read: quant_method fp8 as DeepSeek-V3, Qwen3 and MiniMax-M2 are published, with weight_block_size, or with null,
// where a matrix or each of its rows has one scale; and compressed-tensors with 8 bits of float for all linear layers
// (GLM-4.x).
#pragma once

#include <filesystem>
#include <optional>
#include <string>

#include "espalier/base/json.h"
#include "espalier/shape/model_shape.h"

namespace espalier {

// Reads quantization_config; empty if it is of another method. Errors: InputError for damaged members, UnsupportedError
// for forms that are not read; both with `where`.
std::optional<StoredQuantised> read_fp8(const Json& quantization, const std::string& where);

// Reads that of a model directory; empty without one. Errors: as read_fp8.
std::optional<StoredQuantised> stored_fp8(const std::filesystem::path& directory);

}  // namespace espalier
