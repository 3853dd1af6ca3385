// Settings as they were given: a name, a value, and where it stands. TRL's and peft's names among them: trl_names.h,
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
  bool implied = false;  // a default that comes with other names: holds only where nothing else was said
};

// Applies the settings of one source in order. TRL's and peft's names are turned into Espalier's first, so that within
// one source Espalier's own names win, and what an earlier source set stays but for what TRL's names say themselves; a
// sentence for each is added to `notes`. Errors: OptionError; UnsupportedError for a value of TRL that has no
// counterpart.
void apply_settings(Options& options, const std::vector<OptionSetting>& settings, std::vector<std::string>& notes);

}  // namespace espalier
