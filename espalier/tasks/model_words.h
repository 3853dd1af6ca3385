// Checks that the user's tokenizer covers the words of the built-in tasks.
#pragma once

#include <filesystem>

#include "espalier/shape/model_shape.h"

namespace espalier {

// The tasks' tokens must be those words in the model's tokenizer.json; a model without one must at least have as many
// tokens. Errors: InputError naming words that the model lacks.
void check_words(const std::filesystem::path& model, const ModelShape& shape);

}  // namespace espalier
