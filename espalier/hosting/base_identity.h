// A base model's identity: another model may come to have its name.
#pragma once

#include <filesystem>
#include <string>

#include "espalier/shape/model_shape.h"

namespace espalier {

// A checksum of its shape and of samples of its weight files, wherever they lie.
std::string identity_of(const ModelShape& shape, const std::filesystem::path& folder);

}  // namespace espalier
