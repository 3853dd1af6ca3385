#include "espalier/settings/settings.h"

#include <algorithm>
#include <iterator>

#include "espalier/settings/peft_names.h"
#include "espalier/settings/trl_names.h"

namespace espalier {
namespace {

bool was_set(const Options& options, const OptionSetting& setting) {
  return option_text(options, setting.name) != find_option(setting.name)->default_text;
}

}  // namespace

void apply_settings(Options& options, const std::vector<OptionSetting>& settings, std::vector<std::string>& notes) {
  std::vector<OptionSetting> translated = translate_trl_names(settings, notes);
  std::erase_if(translated, [&](const OptionSetting& each) { return each.implied && was_set(options, each); });
  std::ranges::move(translate_peft_names(settings, notes), std::back_inserter(translated));
  for (const OptionSetting& setting : translated) set_option(options, setting.name, setting.value, setting.where);
  for (const OptionSetting& setting : settings)
    if (!is_alias(setting.name)) set_option(options, setting.name, setting.value, setting.where);
}

}  // namespace espalier
