// The JSON header of a safetensors file as data, before its numbers are checked against the file.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "espalier/checkpoint/safetensors.h"

namespace espalier {

struct SafetensorsHeader {
  std::vector<SafetensorsEntry> entries;                         // name, type, shape, count, bytes; data is null
  std::vector<std::pair<std::uint64_t, std::uint64_t>> offsets;  // [begin, end) of each entry in the data
  std::map<std::string, std::string> metadata;
};

// Checks syntax, members, types, that names are unique and that the size of each tensor is its shape's product.
// Errors: InputError, with `where` in front.
SafetensorsHeader parse_safetensors_header(std::string_view text, const std::string& where);

}  // namespace espalier
