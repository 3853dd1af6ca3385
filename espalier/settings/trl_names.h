// TRL's names of GRPOConfig, read as settings of our options. If one of them is given, the update follows TRL's
// formulas and its defaults for options not given. Settings without a counterpart are refused by name. Source: TRL
// 1.16, trl/trainer/grpo_config.py and GRPOTrainer._compute_loss.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "espalier/settings/settings.h"

namespace espalier {

std::vector<std::string> trl_names();

// TRL's names and the names of peft_names.h.
bool is_alias(std::string_view name);
std::vector<std::string> alias_names();

// The options that a name sets; a verb takes the name where it takes one of them.
std::vector<std::string> alias_targets(std::string_view name);

// Translates TRL's names in `settings`, defaults first; empty where there are none. `notes` are for the user.
// Errors: OptionError for a value that TRL would not take either, UnsupportedError for what has no counterpart.
std::vector<OptionSetting> translate_trl_names(const std::vector<OptionSetting>& settings,
                                               std::vector<std::string>& notes);

}  // namespace espalier
