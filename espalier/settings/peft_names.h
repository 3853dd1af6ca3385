// Names of adapter settings in peft's LoraConfig, TRL's ModelConfig and verl's model configuration. Each is another
// name of one option; unlike TRL's names of formulas (trl_names.h) they change nothing else. Source: peft 0.21,
// LoraConfig; TRL 1.16, trainer/model_config.py; verl 0.6, actor_rollout_ref.model.
#pragma once

#include <map>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "espalier/settings/settings.h"

namespace espalier {

// The option of each name, with '_' in the name.
const std::map<std::string, std::string>& peft_names();

// Settings without an option: a value other than none, false or an empty list is refused.
struct RefusedPeftName {
  std::string_view name;
  const char* option;  // a verb takes the name where it takes this one
  const char *expected, *remedy;
};
std::span<const RefusedPeftName> refused_peft_names();
const RefusedPeftName* refused_peft_name(std::string_view name);  // null: none of them

// The settings of those names under the option's own. "[a, b]" and "['a', 'b']" are read as a,b; none means the
// option's default. Targets of modules and of parameters are one list. A sentence for each is added to `notes`.
// Errors: UnsupportedError for refused settings.
std::vector<OptionSetting> translate_peft_names(const std::vector<OptionSetting>& settings,
                                                std::vector<std::string>& notes);

}  // namespace espalier
