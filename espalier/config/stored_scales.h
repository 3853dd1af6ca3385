// Factors of layers' results, which files hold beside the weights: layer_scalar (Gemma 4).
#pragma once

#include <filesystem>

#include "espalier/shape/model_shape.h"

namespace espalier {

// Sets LayerShape::output_scale from the files in the directory. Layers without the tensor keep 1. Errors: InputError
// if a tensor is not one finite number.
void set_stored_scales(const std::filesystem::path& directory, ModelShape& shape);

}  // namespace espalier
