// Settings as given: a name, a value, and its place. They include TRL's and peft's names: trl_names.h,
// peft_names.h.
#pragma once

#include <string>
#include <vector>

#include "espalier/options/options.h"

namespace espalier {

struct OptionSetting {
  std::string name;  // with '-' or '_', no leading dashes
  std::string value;
  std::string where;     // "run.toml:3: ", empty for the command line
  bool implied = false;  // a default implied by other names: yields to any explicit setting
};

// Applies the settings of one source in order. TRL's and peft's names are translated to Espalier's first, so that
// within one source Espalier's own names override them. Defaults that TRL's names imply do not override values of an
// earlier source. Each translation adds a sentence to `notes`. Errors: OptionError; UnsupportedError for a value of TRL
// or peft without a counterpart.
void apply_settings(Options& options, const std::vector<OptionSetting>& settings, std::vector<std::string>& notes);

}  // namespace espalier
