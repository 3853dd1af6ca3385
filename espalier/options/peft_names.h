// Names of adapter settings in peft's LoraConfig, TRL's ModelConfig and verl's model configuration. Each is another
// name of one option; unlike TRL's names of formulas (trl_names.h) they change nothing else. Source: peft 0.21,
// LoraConfig; TRL 1.16, trainer/model_config.py; verl 0.6, actor_rollout_ref.model.
#pragma once

#include <map>
#include <string>
#include <vector>

#include "espalier/options/settings.h"

namespace espalier {

// The option of each name, with '_' in the name.
const std::map<std::string, std::string>& peft_names();

// The settings of those names under the option's own. "[a, b]" and "['a', 'b']" are read as a,b; none of adapters and
// of modules_to_save means the option's default. A sentence for each is added to `notes`.
std::vector<OptionSetting> translate_peft_names(const std::vector<OptionSetting>& settings,
                                                std::vector<std::string>& notes);

}  // namespace espalier
