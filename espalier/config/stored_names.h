// Finds the forms of a directory's files, among the forms that its family's files may have: their names decide.
#pragma once

#include <filesystem>

#include "espalier/shape/model_shape.h"

namespace espalier {

// Sets expert_files, file_root, file_head and dense_below_experts of a shape's names as the directory's tensors have
// them. Without readable weights nothing changes; the loader reports what is wrong with weights.
void set_stored_names(const std::filesystem::path& directory, ModelShape& shape);

}  // namespace espalier
