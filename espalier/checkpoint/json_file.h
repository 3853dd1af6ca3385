// Small JSON files of a model or a run: read whole, with limits on size and depth.
#pragma once

#include <filesystem>
#include <string>

#include "espalier/base/json.h"

namespace espalier {

// The JSON object in a file. Errors: InputError with the path: missing, larger than 256 MiB, no valid JSON (with the
// byte), nested deeper than 100, no object at the top.
Json read_json_object(const std::filesystem::path& path);

// The JSON object that `text` is. Errors: InputError at `where`, as above.
Json parse_json_object(const std::string& text, const std::string& where);

// The whole content of a file. Errors: InputError.
std::string read_text_file(const std::filesystem::path& path);

// Two spaces of indentation and a final newline. Errors: OptionError.
void write_json_file(const std::filesystem::path& path, const Json& value);

}  // namespace espalier
