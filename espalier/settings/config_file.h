// Options from a TOML file: keys are option names ('-' or '_'); a table [train] holds what only that verb sees.
//
//   lr = 2e-6
//   betas = [0.9, 0.95]
//   [verify]
//   dtype = "float64"
#pragma once

#include <string>
#include <vector>

#include "espalier/settings/settings.h"

namespace espalier {

// The settings of `path` for one verb, top-level keys first. A top-level key may belong to other verbs and is then left
// out; a key of the verb's own table may not. `verbs` are the names that may head a table.
// Errors: InputError where the file cannot be read, OptionError with file and line for TOML that cannot be parsed, an
// unknown name (with the nearest known one) or a value that is no string, number, boolean or array of these.
std::vector<OptionSetting> read_config(const std::string& path, const std::string& verb, char letter,
                                       const std::vector<std::string>& verbs);

// All options that the verb takes as such a file: read_config and apply_settings give the same options again.
std::string config_text(const Options& options, const std::string& verb, char letter);

}  // namespace espalier
