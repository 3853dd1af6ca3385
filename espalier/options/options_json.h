// The resolved options as JSON and back, for run logs, checkpoints and --json.
#pragma once

#include "espalier/base/json.h"
#include "espalier/options/options.h"

namespace espalier {

// One member per option that `verb` (a letter of the table) takes, '\0' for all, under the row's field name.
// Numbers, integers and flags in their own JSON types, lists as arrays.
Json options_to_json(const Options& options, char verb = '\0');

// The defaults with the members of `json` set; exact for what options_to_json wrote.
// Errors: OptionError whose place starts with `where` (unknown name, wrong type, out of range).
Options options_from_json(const Json& json, const std::string& where);

}  // namespace espalier
