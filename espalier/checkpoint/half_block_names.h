// Reading names of Nemotron-H's files, whose layers are halves of blocks (shape/file_names.h).
#pragma once

#include <map>
#include <span>
#include <string>

namespace espalier {

// Maps the files' names to the names here; other names are not in the result. Files may also begin with "model.", as
// transformers names its modules.
std::map<std::string, std::string> names_of_blocks(std::span<const std::string> names_of_files);

}  // namespace espalier
