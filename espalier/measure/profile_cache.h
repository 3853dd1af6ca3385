// Where profiles of machines are kept: $XDG_CACHE_HOME/espalier, or ~/.cache/espalier.
#pragma once

#include <filesystem>
#include <string>
#include <string_view>

#include "espalier/base/json_fwd.h"

namespace espalier {

inline constexpr int kProfileVersion = 6;  // of what is measured and how: another version is measured again

// `name`.json; empty where there is no such folder.
std::filesystem::path cache_file(const std::string& name);

// False where `file` cannot be written; whether, without writing anything.
bool write_cache(const std::filesystem::path& file, const Json& json);
bool can_write_cache(const std::filesystem::path& file);

// "AMDEPYC...": the letters and digits, as a file name may hold them.
std::string file_word(std::string_view name);

}  // namespace espalier
